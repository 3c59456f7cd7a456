//! The hand-off of a KV cache from the engine that prefilled to the engine that decodes.
//!
//! A [`Prefill`] engine runs a Core ML package over a prompt and leaves a [`CacheView`]: memory, a layout and
//! the live rows. [`hand_off`] plans and copies it into tensors of another layout, and says what it did. What
//! only Python can do (tokenising, decoding with MLX) lives with the Python package.

#![forbid(unsafe_code)]

mod accelerated;
mod activations;
#[cfg(target_os = "macos")]
mod apple;
pub mod bench;
mod chain;
mod chunks;
mod compatible;
mod cpu;
mod cut;
mod decode;
mod described;
mod digest;
mod dump;
mod engine;
mod error;
pub mod fake;
mod functions;
mod handoff;
mod inputs;
mod machines;
mod prefill;
mod recode;
mod report;
mod scan;
pub mod selftest;
mod stream;
mod tensors;
pub mod verify;
mod view;
mod work;

pub use accelerated::{RuntimeDecode, RuntimePrefill};
pub use activations::{Activation, Activations, Overflow};
pub use chain::{ChainFile, ChainPrefill, StageFile, StatedLayout, chain_file};
pub use chunks::ChunkTime;
pub use compatible::{Waived, check_compatible, check_vocabulary};
pub use cpu::{CpuPrefill, Stated};
pub use decode::{CpuDecode, Decode, DecodeFacts};
pub use digest::{DigestCache, files_digest, weights_digest};
pub use dump::open_dump;
pub use engine::{Engine, EngineOptions, Waiting, open_decode, open_prefill};
pub use error::{Error, ErrorKind};
pub use handoff::{Filled, HandoffOptions, Target, Wanted, hand_off, hand_off_to};
pub use kvbaton_copy::{CopyOptions, CopyStats, Memcpy, OnOverflow, Threads};
pub use kvbaton_exec::{Numerics, Options as CpuOptions, WeightStorage};
pub use kvbaton_layout as layout;
pub use kvbaton_memory::Bytes;
pub use kvbaton_mil as mil;
pub use kvbaton_plan as plan;
pub use kvbaton_runtime as runtime;
pub use machines::{
    calibrated_file, kept_machine, machine, read_machine, shipped_machines, this_machine, write_machine,
};
pub use prefill::{ChunkSink, FunctionInfo, Logits, Prefill, Prefilled, SharedPrefill, choose_function};
pub use report::{HandoffReport, PathTaken, PrefillReport, Range, StreamReport, memcpy_share};
pub use scan::{Finding, Scan, Unusual};
pub use stream::{StreamOptions, Streamed, prefill_into};
pub use view::{CacheView, Tensor};
pub use work::{built_in_work, model_work};
