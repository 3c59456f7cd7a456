//! Row passes and matrix products: the arithmetic of the executor.
//!
//! Every kernel computes in `f32` and, where asked to (`half`), rounds its result to the nearest fp16 value
//! (ties to even), kept as `f32`. Bodies are written once over sixteen lanes and compiled for each
//! instruction set; [`Isa`] picks one at run time. All instruction sets give the same bits.
//!
//! Nothing here knows about tensors, shapes of more than two dimensions or MIL: that is `kvbaton-exec`.

mod arch;
mod elementwise;
mod expand;
mod lanes;
mod matmul;
mod reduce;
mod unpack;

pub use elementwise::{Binary, Pointwise, Source, Table, Unary, binary, narrow, unary, widen};
pub use expand::{expand, expand_codes, keep};
pub use matmul::{Matrix, Panels, Product, multiply, multiply_into};
pub use reduce::{Reduction, layer_norm, reduce, softmax};
pub use unpack::{lookup, numbers, shift_scale, unpack};

use half::f16;
use lanes::Kernel;

/// Terms after which a sum is rounded when [`Isa::with_half_sums`] asks for it.
pub const HALF_SUM_TERMS: usize = 32;

/// An instruction set that this CPU has, and how the sums of fp16 results are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa {
    set: Set,
    half_sums: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Portable(arch::portable::Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(arch::x86_64::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(arch::x86_64::Avx512),
}

impl Isa {
    fn of(set: Set) -> Isa {
        Isa { set, half_sums: false }
    }

    /// The same instructions, with the sums of fp16 results kept in fp16 as well (`true`) or in `f32`.
    ///
    /// Kept in fp16, the sum of a product's element, which grows in ascending order of `k`, is rounded after every
    /// [`HALF_SUM_TERMS`] terms and after the last one, then the bias is added. A sum over a row (softmax, reductions)
    /// runs in its sixteen partial sums, each rounded after every two terms (that is, after every
    /// [`HALF_SUM_TERMS`] values of the row) and after its last; each addition of halves is rounded, too. Results
    /// that are not fp16 are summed in `f32` all the same, and so are mean and variance of [`layer_norm`].
    #[must_use]
    pub fn with_half_sums(self, half_sums: bool) -> Isa {
        Isa { half_sums, ..self }
    }

    /// Whether sums of fp16 results are kept in fp16.
    pub fn has_half_sums(self) -> bool {
        self.half_sums
    }

    /// The fastest one this CPU has.
    pub fn best() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(set) = arch::x86_64::Avx512::new() {
                return Isa::of(Set::Avx512(set));
            }
            if let Some(set) = arch::x86_64::Avx2::new() {
                return Isa::of(Set::Avx2(set));
            }
        }
        Isa::portable()
    }

    /// Plain Rust, which every CPU runs.
    pub fn portable() -> Isa {
        Isa::of(Set::Portable(arch::portable::Portable))
    }

    /// All that this CPU has, the portable one first: for tests and benches.
    pub fn available() -> Vec<Isa> {
        #[cfg(target_arch = "x86_64")]
        let more = [
            arch::x86_64::Avx2::new().map(|set| Isa::of(Set::Avx2(set))),
            arch::x86_64::Avx512::new().map(|set| Isa::of(Set::Avx512(set))),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let more: [Option<Isa>; 0] = [];
        std::iter::once(Isa::portable()).chain(more.into_iter().flatten()).collect()
    }

    /// Its name: `portable`, `avx2`, `avx512`.
    pub fn name(self) -> &'static str {
        match self.set {
            Set::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) => "avx512",
        }
    }

    /// Runs `kernel` compiled for this instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self.set {
            Set::Portable(l) => kernel.run(l),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(l) => l.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(l) => l.run(kernel),
        }
    }
}

/// `bytes` as fp16 values in this machine's byte order, or `None` when they are not aligned to two bytes or
/// their number is odd.
pub fn as_halves(bytes: &[u8]) -> Option<&[f16]> {
    // SAFETY: every bit pattern is an `f16`.
    match unsafe { bytes.align_to::<f16>() } {
        ([], halves, []) => Some(halves),
        _ => None,
    }
}

/// `bytes` as `f32` values in this machine's byte order, or `None` when they are not aligned to four bytes or
/// their number is no multiple of four.
pub fn as_singles(bytes: &[u8]) -> Option<&[f32]> {
    // SAFETY: every bit pattern is an `f32`.
    match unsafe { bytes.align_to::<f32>() } {
        ([], singles, []) => Some(singles),
        _ => None,
    }
}

/// `bytes` as fp16 values to write, under the same conditions as [`as_halves`].
pub fn as_halves_mut(bytes: &mut [u8]) -> Option<&mut [f16]> {
    // SAFETY: every bit pattern is an `f16`, and every `f16` is two valid bytes.
    match unsafe { bytes.align_to_mut::<f16>() } {
        ([], halves, []) => Some(halves),
        _ => None,
    }
}
