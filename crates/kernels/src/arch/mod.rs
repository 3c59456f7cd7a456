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
    /// As [`Matrix::stream`].
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only AVX-512 has bodies that heed it")
    )]
    pub stream: bool,
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
    /// Whether the destination is memory that nobody reads soon. Bodies that can then write its whole cache lines past the
    /// caches, which spares reading what is overwritten; [`Cpu::fence`] orders those writes.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only AVX-512 has bodies that heed it")
    )]
    pub stream: bool,
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

/// Calls a body of the instruction set at hand, whose capability is the proof that this CPU has its features.
macro_rules! on {
    ($cpu:expr, $body:ident($($argument:expr),*)) => {
        match $cpu {
            Cpu::Scalar => scalar::$body($($argument),*),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the capability exists only where its detection saw the body's features.
            Cpu::Avx2(_) => unsafe { x86_64::avx2::$body($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the capability exists only where its detection saw the body's features.
            Cpu::Avx512(_) => unsafe { x86_64::avx512::$body($($argument),*) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: the capability exists only where its detection saw the body's features.
            Cpu::Neon(_) => unsafe { aarch64::neon::$body($($argument),*) },
        }
    };
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
            x86_64::Avx512::without_bf16().map(Cpu::Avx512),
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

    /// Whether this CPU's bodies can write past its caches, see [`Lines::stream`].
    pub(crate) fn can_stream(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if let Cpu::Avx512(_) = self {
            return true;
        }
        false
    }

    /// Orders what [`Lines::stream`] and [`Matrix::stream`] wrote before every later store, such as one that tells another
    /// thread of them.
    pub(crate) fn fence(self) {
        #[cfg(target_arch = "x86_64")]
        if let Cpu::Avx512(_) = self {
            // SAFETY: SSE is part of x86-64.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }

    /// Copies lines of `block.lanes` bytes; their whole cache lines past the caches if `block.stream` and the CPU can.
    ///
    /// # Safety
    ///
    /// As for [`Cpu::convert`].
    pub(crate) unsafe fn copy_lines(self, block: Lines) {
        // SAFETY: the capability exists only where its detection saw the features; the rest is the caller's promise.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if let Cpu::Avx512(_) = self
                && block.stream
            {
                return x86_64::avx512::stream_lines(block);
            }
            scalar::copy_lines(block);
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

    /// Codes, scales and biases of whole groups; see [`crate::affine`]. Slices hold whole groups of the same lanes.
    pub(crate) fn affine_encode(
        self,
        group: usize,
        bits: u32,
        values: &[f32],
        codes: &mut [u8],
        scales: &mut [f32],
        biases: &mut [f32],
    ) {
        on!(self, affine_encode(group, bits, values, codes, scales, biases))
    }

    /// `code · scale` for whole groups.
    pub(crate) fn affine_scale(self, group: usize, codes: &[u8], scales: &[f32], products: &mut [f32]) {
        on!(self, affine_scale(group, codes, scales, products))
    }

    /// Adds each group's bias to its values.
    pub(crate) fn affine_shift(self, group: usize, values: &mut [f32], biases: &[f32]) {
        on!(self, affine_shift(group, values, biases))
    }

    /// Turns lines of int8 codes into floats, `code · scales[line]`, overflowing to infinity. Returns what
    /// [`Cpu::convert`] returns.
    ///
    /// # Safety
    ///
    /// As for [`Cpu::convert`].
    pub(crate) unsafe fn int8_decode(self, to: Elem, block: Lines, scales: &[f32]) -> bool {
        assert_eq!(scales.len(), block.lines, "a scale for every line");
        // SAFETY: the caller's promise is the body's.
        unsafe {
            match self {
                Cpu::Scalar => scalar::convert_scaled(Elem::I8, to, block, scales),
                #[cfg(target_arch = "x86_64")]
                Cpu::Avx2(_) => x86_64::avx2::int8_decode(to, block, scales),
                #[cfg(target_arch = "x86_64")]
                Cpu::Avx512(_) => x86_64::avx512::int8_decode(to, block, scales),
                #[cfg(target_arch = "aarch64")]
                Cpu::Neon(_) => aarch64::neon::int8_decode(to, block, scales),
            }
        }
    }

    /// `value / scale` as a signed code.
    pub(crate) fn int8_encode(self, values: &[f32], scale: f32, codes: &mut [i8]) {
        on!(self, int8_encode(values, scale, codes))
    }

    /// The smallest and the largest value; infinities of the wrong sign for none. A NaN is passed over.
    pub(crate) fn range(self, values: &[f32]) -> (f32, f32) {
        on!(self, range(values))
    }
}

/// The bodies that are written once, compiled for an instruction set.
macro_rules! shared_bodies {
    ($(#[$features:meta])*) => {
        $(#[$features])*
        pub(crate) fn affine_encode(
            group: usize,
            bits: u32,
            values: &[f32],
            codes: &mut [u8],
            scales: &mut [f32],
            biases: &mut [f32],
        ) {
            crate::affine::body::encode(group, bits, values, codes, scales, biases, |group| range(group));
        }

        $(#[$features])*
        pub(crate) fn affine_scale(group: usize, codes: &[u8], scales: &[f32], products: &mut [f32]) {
            crate::affine::body::scale(group, codes, scales, products);
        }

        $(#[$features])*
        pub(crate) fn affine_shift(group: usize, values: &mut [f32], biases: &[f32]) {
            crate::affine::body::shift(group, values, biases);
        }

        $(#[$features])*
        pub(crate) fn int8_encode(values: &[f32], scale: f32, codes: &mut [i8]) {
            crate::int8::body::encode(values, scale, codes);
        }
    };
}
use shared_bodies;
