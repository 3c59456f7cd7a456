//! x86-64: 256-bit bodies for AVX2 with F16C, 512-bit bodies for AVX-512.

pub(super) mod avx2;
pub(super) mod avx512;

use super::{Lines, Matrix};
use crate::Elem;

/// AVX2, FMA and F16C: every x86-64 of the last decade.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2F16c(());

impl Avx2F16c {
    pub(crate) fn new() -> Option<Avx2F16c> {
        let seen = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        seen.then_some(Avx2F16c(()))
    }

    /// # Safety
    ///
    /// As for [`super::Cpu::convert`].
    pub(super) unsafe fn convert(self, from: Elem, to: Elem, block: Lines) -> bool {
        // SAFETY: `self` exists only if `new` saw the features; the rest is the caller's promise.
        unsafe { avx2::convert(from, to, block) }
    }

    /// # Safety
    ///
    /// As for [`super::Cpu::transpose`].
    pub(super) unsafe fn transpose(self, bytes: usize, matrix: Matrix) {
        // SAFETY: as above.
        unsafe { avx2::transpose(bytes, matrix) }
    }
}

/// AVX-512 with its byte, word and vector-length parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512 {
    /// Whether f32 narrows to bf16 in one instruction.
    bf16: bool,
}

impl Avx512 {
    pub(crate) fn new() -> Option<Avx512> {
        let seen = Avx2F16c::new().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        seen.then(|| Avx512 { bf16: is_x86_feature_detected!("avx512bf16") })
    }

    /// The same as on a CPU that has no bf16 instructions.
    pub(crate) fn without_bf16() -> Option<Avx512> {
        Avx512::new().map(|_| Avx512 { bf16: false })
    }

    /// # Safety
    ///
    /// As for [`super::Cpu::convert`].
    pub(super) unsafe fn convert(self, from: Elem, to: Elem, block: Lines) -> bool {
        // SAFETY: `self` exists only if `new` saw the features; the rest is the caller's promise.
        unsafe {
            match (from, to, block.stream) {
                (Elem::F16, Elem::BF16, false) if self.bf16 => avx512::f16_to_bf16_directly::<false>(block),
                (Elem::F16, Elem::BF16, true) if self.bf16 => avx512::f16_to_bf16_directly::<true>(block),
                _ => avx512::convert(from, to, block),
            }
        }
    }

    /// # Safety
    ///
    /// As for [`super::Cpu::transpose`].
    pub(super) unsafe fn transpose(self, bytes: usize, matrix: Matrix) {
        // SAFETY: as above.
        unsafe { avx512::transpose(bytes, matrix) }
    }
}
