//! Bit masks that say which elements of a sparse weight are stored.

use kvbaton_kernels::rows::{self, Isa};

use super::recipe::Stored;

/// Bits between two counts of those set before.
const STRIDE: usize = 4096;

/// One bit an element, the lowest first.
#[derive(Clone, Debug)]
pub(crate) struct Mask {
    bytes: Stored,
    /// Bits set before every [`STRIDE`]-th one.
    ranks: Vec<usize>,
    set: usize,
}

impl Mask {
    /// A mask of `len` elements.
    ///
    /// # Errors
    ///
    /// When `bytes` does not hold as many bits, or a bit after them is set.
    pub(crate) fn new(bytes: Stored, len: usize) -> Result<Mask, String> {
        let have = bytes.get();
        if have.len() != len.div_ceil(8) {
            return Err(format!("a mask of {} bytes for {len} elements", have.len()));
        }
        if !len.is_multiple_of(8) && have.last().is_some_and(|b| b >> (len % 8) != 0) {
            return Err(format!("a mask of {len} elements has a bit set after them"));
        }
        let mut ranks = Vec::with_capacity(len / STRIDE + 1);
        let mut set = 0;
        for chunk in have.chunks(STRIDE / 8) {
            ranks.push(set);
            set += chunk.iter().map(|b| b.count_ones() as usize).sum::<usize>();
        }
        Ok(Mask { bytes, ranks, set })
    }

    /// Bits that are set.
    pub(crate) fn set(&self) -> usize {
        self.set
    }

    /// Whether element `i` is stored.
    pub(crate) fn has(&self, i: usize) -> bool {
        self.bytes.get()[i / 8] >> (i % 8) & 1 != 0
    }

    /// Bits set before element `i`.
    pub(crate) fn rank(&self, i: usize) -> usize {
        let bytes = self.bytes.get();
        let from = i / STRIDE * STRIDE;
        let whole: usize = bytes[from / 8..i / 8].iter().map(|b| b.count_ones() as usize).sum();
        let part =
            if i.is_multiple_of(8) { 0 } else { (bytes[i / 8] & ((1 << (i % 8)) - 1)).count_ones() as usize };
        self.ranks.get(i / STRIDE).copied().unwrap_or(self.set) + whole + part
    }

    /// The mask with every element repeated `times` times along a dimension whose elements are `inner` each.
    pub(crate) fn repeated(&self, len: usize, inner: usize, times: usize) -> Result<Mask, String> {
        let mut bytes = vec![0u8; (len * times).div_ceil(8)];
        // Rows of `inner` elements, each of them `times` times.
        let mut to = 0;
        for row in 0..len / inner.max(1) {
            for _ in 0..times {
                for i in row * inner..(row + 1) * inner {
                    bytes[to / 8] |= u8::from(self.has(i)) << (to % 8);
                    to += 1;
                }
            }
        }
        Mask::new(Stored::Inline(bytes.into()), len * times)
    }

    /// Spreads the values of the elements set among `start..start + out.len()`; 0 goes to the others.
    pub(crate) fn spread(&self, isa: Isa, start: usize, stored: &[f32], out: &mut [f32]) {
        rows::expand(isa, self.from(start), start % 8, stored, out);
    }

    /// As [`Mask::spread`], of codes.
    pub(crate) fn spread_codes(&self, isa: Isa, start: usize, stored: &[u8], out: &mut [u8]) {
        rows::expand_codes(isa, self.from(start), start % 8, stored, out);
    }

    /// Puts 0 where no element of `start..start + out.len()` is stored.
    pub(crate) fn clear(&self, isa: Isa, start: usize, out: &mut [f32]) {
        rows::keep(isa, self.from(start), start % 8, out);
    }

    /// Whether two masks have the same bits.
    pub(crate) fn equals(&self, other: &Mask) -> bool {
        self.bytes.get() == other.bytes.get()
    }

    /// The bytes from the one on that has element `start`.
    fn from(&self, start: usize) -> &[u8] {
        &self.bytes.get()[start / 8..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(bits: &[bool]) -> Mask {
        let mut bytes = vec![0u8; bits.len().div_ceil(8)];
        for (i, b) in bits.iter().enumerate() {
            bytes[i / 8] |= u8::from(*b) << (i % 8);
        }
        Mask::new(Stored::Inline(bytes.into()), bits.len()).unwrap()
    }

    #[test]
    fn ranks_count_the_bits_before() {
        let bits: Vec<bool> = (0..10_001).map(|i| i * i % 7 < 3).collect();
        let mask = mask(&bits);
        for i in (0..=bits.len()).step_by(37).chain([bits.len()]) {
            assert_eq!(mask.rank(i), bits[..i].iter().filter(|b| **b).count(), "{i}");
        }
        assert_eq!(mask.set(), mask.rank(bits.len()));
    }

    #[test]
    fn stored_values_go_where_bits_are_set() {
        let mask = mask(&[true, false, true, true, false]);
        let mut out = [9.0; 4];
        mask.spread(Isa::best(), 1, &[2.0, 3.0], &mut out);
        assert_eq!(out, [0.0, 2.0, 3.0, 0.0]);
    }

    #[test]
    fn every_part_of_a_mask_is_spread_and_cleared_as_its_bits_say() {
        let bits: Vec<bool> = (0..70).map(|i| i * i % 11 < 4 || i / 8 == 3).collect();
        let mask = mask(&bits);
        for start in 0..=bits.len() {
            for end in start..=bits.len() {
                let part = start..end;
                let want: Vec<u8> =
                    part.clone().map(|i| if bits[i] { u8::try_from(i + 1).unwrap() } else { 0 }).collect();
                let stored: Vec<u8> = want.iter().copied().filter(|v| *v > 0).collect();
                let floats = |values: &[u8]| values.iter().map(|v| f32::from(*v)).collect::<Vec<f32>>();
                let isa = Isa::best();
                let mut out = vec![99; part.len()];
                mask.spread_codes(isa, start, &stored, &mut out);
                assert_eq!(out, want, "{part:?}");
                let mut out = vec![99.0; part.len()];
                mask.spread(isa, start, &floats(&stored), &mut out);
                assert_eq!(out, floats(&want), "{part:?}");
                let mut out: Vec<f32> =
                    part.clone().map(|i| if bits[i] { (i + 1) as f32 } else { 99.0 }).collect();
                mask.clear(isa, start, &mut out);
                assert_eq!(out, floats(&want), "{part:?}");
            }
        }
    }

    #[test]
    fn repeating_goes_along_one_dimension() {
        // [[1, 0], [0, 1]]: rows twice, then columns twice.
        let mask = mask(&[true, false, false, true]);
        let bits = |m: &Mask| (0..8).map(|i| u8::from(m.has(i))).collect::<Vec<_>>();
        assert_eq!(bits(&mask.repeated(4, 2, 2).unwrap()), [1, 0, 1, 0, 0, 1, 0, 1]);
        assert_eq!(bits(&mask.repeated(4, 1, 2).unwrap()), [1, 1, 0, 0, 0, 0, 1, 1]);
    }

    #[test]
    fn masks_of_another_size_are_refused() {
        assert!(Mask::new(Stored::Inline(vec![1, 2].into()), 5).is_err());
        assert!(Mask::new(Stored::Inline(vec![0b10_0000].into()), 5).is_err());
    }
}
