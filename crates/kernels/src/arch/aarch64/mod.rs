//! 64-bit ARM: NEON, which every such CPU has.

pub(super) mod neon;

use super::{Lines, Matrix};
use crate::Elem;

/// NEON with conversions between f16 and f32, both part of the base instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(());

impl Neon {
    pub(crate) fn new() -> Option<Neon> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }

    /// # Safety
    ///
    /// As for [`super::Cpu::convert`].
    pub(super) unsafe fn convert(self, from: Elem, to: Elem, block: Lines) -> bool {
        // SAFETY: `self` exists only if `new` saw the feature; the rest is the caller's promise.
        unsafe { neon::convert(from, to, block) }
    }

    /// # Safety
    ///
    /// As for [`super::Cpu::transpose`].
    pub(super) unsafe fn transpose(self, bytes: usize, matrix: Matrix) {
        // SAFETY: as above.
        unsafe { neon::transpose(bytes, matrix) }
    }
}
