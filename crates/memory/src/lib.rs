//! Buffers with one owner, and the leases that say who may read or write a buffer now.
//!
//! Three kinds of memory meet in a hand-off: memory kvbaton allocates ([`Buffer`]), files it maps ([`Mapped`])
//! and memory that belongs to somebody else ([`Foreign`], [`ForeignMut`]). A [`Bytes`] is a shared, read-only handle on any of
//! them. What the bytes mean (shape, strides, dtype) is not known here: see `kvbaton-layout`.

mod buffer;
mod custody;
mod lease;
mod mapped;
mod pages;

pub use buffer::{Buffer, Bytes, Foreign, ForeignMut, PAGE_BYTES, WritableBytes};
pub use custody::{Book, Custody, IllegalMove, Loan, Move, Phase, Turn};
pub use lease::{LeaseError, Leased, ReadLease, WriteLease};
pub use mapped::{MapError, Mapped};
pub use pages::{is_resident, populate, resident_share};
