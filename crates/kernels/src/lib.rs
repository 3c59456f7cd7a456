//! Kernels of a cache hand-off: slices and strided boxes in, slices and strided boxes out.
//!
//! What lives here: moves of 3-D boxes ([`move_box`]), conversions between the float encodings of a cache,
//! int8 codes with scales, and MLX's affine quantisation. What does not: threads, plans and buffers. A caller hands
//! disjoint work to as many threads as it likes and merges their [`Tally`]s.
//!
//! Every kernel has a scalar definition that the fast bodies are tested against. A fast body is reached through a
//! capability that exists only where the CPU can run it.

mod affine;
mod arch;
mod boxes;
mod elem;
mod int8;
pub mod rows;
mod tally;
mod writing;

pub use affine::{Affine, AffineError, affine_dequantize, affine_quantize};
pub use boxes::{BoxMove, move_box, scan_box};
pub use elem::Elem;
pub use int8::{Int8Rows, ScalePer, int8_decode, int8_encode};
pub use tally::{OnOverflow, Tally};
pub use writing::Writing;
