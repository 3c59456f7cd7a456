//! Codes of 2 to 8 bits side by side, without gaps, from the low bit of the first byte upwards.
//!
//! Eight codes of `bits` bits fill `bits` bytes. For widths that divide 32 this is MLX's `u32` words with the first code
//! in the low bits; for 3, 5 and 6 bits it is MLX's runs of 3 and 5 bytes.

/// Codes of eight lanes, one in each byte.
type Eight = u64;

/// Closes the gaps between eight codes of `BITS` bits, by halves.
const fn close<const BITS: usize>(codes: Eight) -> u64 {
    let gap = 8 - BITS;
    let pairs = codes & 0x00FF_00FF_00FF_00FF | (codes & 0xFF00_FF00_FF00_FF00) >> gap;
    let fours = pairs & 0x0000_FFFF_0000_FFFF | (pairs & 0xFFFF_0000_FFFF_0000) >> (2 * gap);
    fours & 0x0000_0000_FFFF_FFFF | (fours & 0xFFFF_FFFF_0000_0000) >> (4 * gap)
}

/// The inverse of [`close`].
const fn open<const BITS: usize>(packed: u64) -> Eight {
    let gap = 8 - BITS;
    let fours = packed & 0xFFFF_FFFF_u64 >> (4 * gap) | (packed >> (4 * BITS)) << 32;
    let pairs_mask = (0xFFFF_u64 >> (2 * gap)) * 0x0000_0001_0000_0001;
    let pairs = fours & pairs_mask | (fours >> (2 * BITS) & pairs_mask) << 16;
    let codes_mask = (0xFF_u64 >> gap) * 0x0001_0001_0001_0001;
    pairs & codes_mask | (pairs >> BITS & codes_mask) << 8
}

/// Packs codes, eight to `bits` bytes.
pub(super) fn pack(bits: u32, codes: &[u8], packed: &mut [u8]) {
    match bits {
        2 => pack_as::<2>(codes, packed),
        3 => pack_as::<3>(codes, packed),
        4 => pack_as::<4>(codes, packed),
        5 => pack_as::<5>(codes, packed),
        6 => pack_as::<6>(codes, packed),
        8 => packed.copy_from_slice(codes),
        other => unreachable!("`Affine` has no codes of {other} bits"),
    }
}

/// Unpacks codes, eight from `bits` bytes.
pub(super) fn unpack(bits: u32, packed: &[u8], codes: &mut [u8]) {
    match bits {
        2 => unpack_as::<2>(packed, codes),
        3 => unpack_as::<3>(packed, codes),
        4 => unpack_as::<4>(packed, codes),
        5 => unpack_as::<5>(packed, codes),
        6 => unpack_as::<6>(packed, codes),
        8 => codes.copy_from_slice(packed),
        other => unreachable!("`Affine` has no codes of {other} bits"),
    }
}

fn pack_as<const BITS: usize>(codes: &[u8], packed: &mut [u8]) {
    for (eight, to) in codes.as_chunks::<8>().0.iter().zip(packed.as_chunks_mut::<BITS>().0) {
        let bytes = close::<BITS>(u64::from_le_bytes(*eight)).to_le_bytes();
        to.copy_from_slice(&bytes[..BITS]);
    }
}

fn unpack_as<const BITS: usize>(packed: &[u8], codes: &mut [u8]) {
    for (from, eight) in packed.as_chunks::<BITS>().0.iter().zip(codes.as_chunks_mut::<8>().0) {
        let mut bytes = [0; 8];
        bytes[..BITS].copy_from_slice(from);
        *eight = open::<BITS>(u64::from_le_bytes(bytes)).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit `n` of the stream is bit `n % bits` of code `n / bits`.
    #[test]
    fn codes_follow_one_another_bit_by_bit() {
        for bits in [2, 3, 4, 5, 6, 8_u32] {
            let codes: Vec<u8> =
                (0..64_u32).map(|n| (n * 37 + n / 3) as u8 & ((1 << bits) - 1) as u8).collect();
            let mut packed = vec![0; 8 * bits as usize];
            pack(bits, &codes, &mut packed);
            for n in 0..64 * bits as usize {
                let bit = packed[n / 8] >> (n % 8) & 1;
                let code = codes[n / bits as usize] >> (n % bits as usize) & 1;
                assert_eq!(bit, code, "bit {n} of {bits}-bit codes");
            }
            let mut back = vec![0xFF; 64];
            unpack(bits, &packed, &mut back);
            assert_eq!(back, codes);
        }
    }
}
