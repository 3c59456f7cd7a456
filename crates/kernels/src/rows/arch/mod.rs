//! Instruction sets.

pub(crate) mod portable;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86_64;
