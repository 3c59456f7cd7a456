//! MLX's affine quantisation: codes of a few bits with a scale and a bias for every group of neighbouring lanes.
//!
//! `value ≈ code · scale + bias`. The arithmetic is that of `mlx::core::quantize` and `dequantize` on the CPU, step by
//! step, so that a cache quantised here has the bits that MLX would have given it.

pub(crate) mod body;
pub(crate) mod definition;
mod packing;

use crate::Elem;
use crate::arch::{Cpu, Lines};

/// Elements that are widened, coded and packed at once: the buffers of a block stay in the nearest cache.
const BLOCK: usize = 4096;

/// The smallest group, which gives a block the most groups.
const SMALLEST_GROUP: usize = 32;

/// Bits of a code and lanes of a group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Affine {
    bits: u8,
    group: u8,
}

/// Why there is no such quantisation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AffineError {
    /// MLX has no codes of that width.
    #[error("no affine quantisation with {bits} bits; MLX has 2, 3, 4, 5, 6 and 8")]
    Bits {
        /// The width asked for.
        bits: u32,
    },
    /// MLX has no groups of that size.
    #[error("no affine quantisation in groups of {group}; MLX has 32, 64 and 128")]
    Group {
        /// The size asked for.
        group: usize,
    },
}

impl Affine {
    /// A quantisation that MLX has.
    ///
    /// # Errors
    ///
    /// When `bits` is not one of 2, 3, 4, 5, 6, 8 or `group` not one of 32, 64, 128.
    pub fn new(bits: u32, group: usize) -> Result<Affine, AffineError> {
        let width = match bits {
            2 | 3 | 4 | 5 | 6 | 8 => bits as u8,
            _ => return Err(AffineError::Bits { bits }),
        };
        let lanes = match group {
            32 | 64 | 128 => group as u8,
            _ => return Err(AffineError::Group { group }),
        };
        Ok(Affine { bits: width, group: lanes })
    }

    /// Bits of a code.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.bits as u32
    }

    /// Lanes that share a scale and a bias.
    #[must_use]
    pub const fn group(self) -> usize {
        self.group as usize
    }

    /// Bytes of the codes of `lanes` lanes, a multiple of the group: `u32` words read as little-endian bytes.
    #[must_use]
    pub const fn packed_bytes(self, lanes: usize) -> usize {
        lanes / 8 * self.bits as usize
    }

    /// Scales, and biases, of `lanes` lanes.
    #[must_use]
    pub const fn groups(self, lanes: usize) -> usize {
        lanes / self.group as usize
    }

    /// Checks that four slices belong together, and returns their lanes.
    fn check(self, elem: Elem, values: usize, packed: usize, scales: usize, biases: usize) -> usize {
        assert!(elem.is_float(), "{elem:?} is not quantised");
        let lanes = values / elem.bytes();
        assert_eq!(values % (elem.bytes() * self.group()), 0, "values fill whole groups");
        assert_eq!(packed, self.packed_bytes(lanes), "bytes of packed codes");
        assert_eq!(scales, self.groups(lanes) * elem.bytes(), "bytes of scales");
        assert_eq!(biases, self.groups(lanes) * elem.bytes(), "bytes of biases");
        lanes
    }
}

/// Quantises lanes of `elem` that lie side by side, as `mx.quantize(values, group_size, bits)` does on the CPU.
///
/// Every slice is bytes, of any alignment: `values`, `scales` and `biases` hold `elem`, `packed` little-endian words.
/// Values must be finite; a group that is not comes out as codes without a meaning.
///
/// # Panics
///
/// When `elem` is not a float, when `values` do not fill whole groups, or when another slice has a different length than
/// [`Affine::packed_bytes`] and [`Affine::groups`] say.
pub fn affine_quantize(
    scheme: Affine,
    elem: Elem,
    values: &[u8],
    packed: &mut [u8],
    scales: &mut [u8],
    biases: &mut [u8],
) {
    quantize_on(Cpu::best(), scheme, elem, values, packed, scales, biases);
}

/// Turns codes back into lanes of `elem`, as `mx.dequantize(packed, scales, biases, group_size, bits)` does on the CPU.
///
/// The product is rounded to `elem` before the bias is added. Slices are as for [`affine_quantize`].
///
/// # Panics
///
/// As [`affine_quantize`].
pub fn affine_dequantize(
    scheme: Affine,
    elem: Elem,
    packed: &[u8],
    scales: &[u8],
    biases: &[u8],
    values: &mut [u8],
) {
    dequantize_on(Cpu::best(), scheme, elem, packed, scales, biases, values);
}

fn quantize_on(
    cpu: Cpu,
    scheme: Affine,
    elem: Elem,
    values: &[u8],
    packed: &mut [u8],
    scales: &mut [u8],
    biases: &mut [u8],
) {
    scheme.check(elem, values.len(), packed.len(), scales.len(), biases.len());
    let mut wide = [0_f32; BLOCK];
    let mut codes = [0_u8; BLOCK];
    let (mut scale, mut bias) = ([0_f32; BLOCK / SMALLEST_GROUP], [0_f32; BLOCK / SMALLEST_GROUP]);
    let block_groups = scheme.groups(BLOCK) * elem.bytes();
    let blocks = values
        .chunks(BLOCK * elem.bytes())
        .zip(packed.chunks_mut(scheme.packed_bytes(BLOCK)))
        .zip(scales.chunks_mut(block_groups).zip(biases.chunks_mut(block_groups)));
    for ((values, packed), (scales, biases)) in blocks {
        let lanes = values.len() / elem.bytes();
        let groups = scheme.groups(lanes);
        widen(cpu, elem, values, &mut wide[..lanes]);
        cpu.affine_encode(
            scheme.group(),
            scheme.bits(),
            &wide[..lanes],
            &mut codes[..lanes],
            &mut scale[..groups],
            &mut bias[..groups],
        );
        packing::pack(scheme.bits(), &codes[..lanes], packed);
        narrow(cpu, elem, &scale[..groups], scales);
        narrow(cpu, elem, &bias[..groups], biases);
    }
}

fn dequantize_on(
    cpu: Cpu,
    scheme: Affine,
    elem: Elem,
    packed: &[u8],
    scales: &[u8],
    biases: &[u8],
    values: &mut [u8],
) {
    scheme.check(elem, values.len(), packed.len(), scales.len(), biases.len());
    let mut wide = [0_f32; BLOCK];
    let mut codes = [0_u8; BLOCK];
    let (mut scale, mut bias) = ([0_f32; BLOCK / SMALLEST_GROUP], [0_f32; BLOCK / SMALLEST_GROUP]);
    let block_groups = scheme.groups(BLOCK) * elem.bytes();
    let blocks = values
        .chunks_mut(BLOCK * elem.bytes())
        .zip(packed.chunks(scheme.packed_bytes(BLOCK)))
        .zip(scales.chunks(block_groups).zip(biases.chunks(block_groups)));
    for ((values, packed), (scales, biases)) in blocks {
        let lanes = values.len() / elem.bytes();
        let groups = scheme.groups(lanes);
        widen(cpu, elem, scales, &mut scale[..groups]);
        widen(cpu, elem, biases, &mut bias[..groups]);
        packing::unpack(scheme.bits(), packed, &mut codes[..lanes]);
        let wide = &mut wide[..lanes];
        cpu.affine_scale(scheme.group(), &codes[..lanes], &scale[..groups], wide);
        // Through `values` and back: the product is rounded as MLX rounds it.
        narrow(cpu, elem, wide, values);
        widen(cpu, elem, values, wide);
        cpu.affine_shift(scheme.group(), wide, &bias[..groups]);
        narrow(cpu, elem, wide, values);
    }
}

/// Reads `elem` as f32.
fn widen(cpu: Cpu, elem: Elem, from: &[u8], to: &mut [f32]) {
    assert_eq!(from.len(), to.len() * elem.bytes(), "as many elements on both sides");
    one_line(cpu, (elem, from.as_ptr()), (Elem::F32, to.as_mut_ptr().cast()), to.len());
}

/// Writes f32 as `elem`.
fn narrow(cpu: Cpu, elem: Elem, from: &[f32], to: &mut [u8]) {
    assert_eq!(to.len(), from.len() * elem.bytes(), "as many elements on both sides");
    one_line(cpu, (Elem::F32, from.as_ptr().cast()), (elem, to.as_mut_ptr()), from.len());
}

/// Converts `lanes` elements; the callers above have checked that both slices hold as many.
fn one_line(cpu: Cpu, (from, src): (Elem, *const u8), (to, dst): (Elem, *mut u8), lanes: usize) {
    if from == to {
        // SAFETY: both sides hold `lanes` elements of the same size, in two slices.
        unsafe { dst.copy_from_nonoverlapping(src, lanes * from.bytes()) };
        return;
    }
    let line = Lines { src, src_stride: 0, dst, dst_stride: 0, lines: 1, lanes, stream: false };
    // SAFETY: as above.
    unsafe { cpu.convert(from, to, line) };
}

#[cfg(test)]
mod tests;
