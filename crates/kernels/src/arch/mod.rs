//! What this CPU can run, found once, and the bodies written for it.
//!
//! A capability is a value that only its own detection makes, so holding one is the proof that its bodies may run.
//! Bodies take raw blocks rather than slices: rows of a cache are strided, unaligned, and shared with neighbours that
//! other threads may be writing.

use std::sync::OnceLock;

use crate::Elem;

#[cfg(target_arch = "aarch64")]
pub(crate) mod aarch64;
pub(crate) mod scalar;
mod tile;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86_64;

/// Lines of elements on both sides: line `n` starts at `n` strides from each pointer, its elements are packed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lines {
    pub src: *const u8,
    pub src_stride: isize,
    pub dst: *mut u8,
    pub dst_stride: isize,
    pub lines: usize,
    pub lanes: usize,
}

/// A matrix to transpose: `rows` packed lines of `cols` elements become `cols` packed lines of `rows` elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub src: *const u8,
    pub src_stride: isize,
    pub dst: *mut u8,
    pub dst_stride: isize,
    pub rows: usize,
    pub cols: usize,
}

/// The instruction set that kernels run on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cpu {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86_64::Avx2F16c),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86_64::Avx512),
    #[cfg(target_arch = "aarch64")]
    Neon(aarch64::Neon),
}

impl Cpu {
    /// The fastest that this CPU offers.
    pub(crate) fn best() -> Cpu {
        static BEST: OnceLock<Cpu> = OnceLock::new();
        *BEST.get_or_init(|| *Cpu::all().last().expect("the scalar bodies run everywhere"))
    }

    /// Everything that this CPU offers, slowest first.
    pub(crate) fn all() -> Vec<Cpu> {
        [
            Some(Cpu::Scalar),
            #[cfg(target_arch = "x86_64")]
            x86_64::Avx2F16c::new().map(Cpu::Avx2),
            #[cfg(target_arch = "x86_64")]
            x86_64::Avx512::new().map(Cpu::Avx512),
            #[cfg(target_arch = "aarch64")]
            aarch64::Neon::new().map(Cpu::Neon),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Converts lines from one float encoding to another, overflowing to infinity. Returns true when some written value
    /// may be infinite or NaN; what a NaN is written as is then left to the caller to settle.
    ///
    /// # Safety
    ///
    /// Every line is readable at `src` and writable at `dst`; the two do not overlap.
    pub(crate) unsafe fn convert(self, from: Elem, to: Elem, block: Lines) -> bool {
        // SAFETY: the caller's promise is the body's.
        unsafe {
            match self {
                Cpu::Scalar => scalar::convert(from, to, block),
                #[cfg(target_arch = "x86_64")]
                Cpu::Avx2(cpu) => cpu.convert(from, to, block),
                #[cfg(target_arch = "x86_64")]
                Cpu::Avx512(cpu) => cpu.convert(from, to, block),
                #[cfg(target_arch = "aarch64")]
                Cpu::Neon(cpu) => cpu.convert(from, to, block),
            }
        }
    }

    /// Transposes a matrix of elements of `bytes` (1, 2, 4 or 8) bytes.
    ///
    /// # Safety
    ///
    /// Every line is readable at `src` and writable at `dst`; the two do not overlap.
    pub(crate) unsafe fn transpose(self, bytes: usize, matrix: Matrix) {
        // SAFETY: the caller's promise is the body's.
        unsafe {
            match self {
                Cpu::Scalar => scalar::transpose(bytes, matrix),
                #[cfg(target_arch = "x86_64")]
                Cpu::Avx2(cpu) => cpu.transpose(bytes, matrix),
                #[cfg(target_arch = "x86_64")]
                Cpu::Avx512(cpu) => cpu.transpose(bytes, matrix),
                #[cfg(target_arch = "aarch64")]
                Cpu::Neon(cpu) => cpu.transpose(bytes, matrix),
            }
        }
    }
}
