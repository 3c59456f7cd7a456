//! Bit masks that say which elements of a sparse weight are stored.

use super::recipe::Stored;

/// Bits between two counts of those set before.
const STRIDE: usize = 4096;

/// For each byte of a mask, which of the next stored values each of its eight elements takes; 8 where none is stored.
/// Bits of a mask are as good as random: looking up costs less than guessing.
const SPREAD: [[u8; 8]; 256] = {
    let mut table = [[8; 8]; 256];
    let mut bits = 0;
    while bits < 256 {
        let (mut i, mut next) = (0, 0);
        while i < 8 {
            if bits >> i & 1 != 0 {
                table[bits][i] = next;
                next += 1;
            }
            i += 1;
        }
        bits += 1;
    }
    table
};

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

    /// Spreads the values of the elements set among `start..start + out.len()`; `zero` goes to the others.
    pub(crate) fn spread<T: Copy>(&self, start: usize, stored: &[T], zero: T, out: &mut [T]) {
        let mut left = stored;
        self.groups(start, out, |bits, group| {
            let mut next = [zero; 16];
            match left.first_chunk::<8>() {
                Some(eight) => next[..8].copy_from_slice(eight),
                None => next[..left.len()].copy_from_slice(left),
            }
            left = left.get(bits.count_ones() as usize..).unwrap_or_default();
            for (x, from) in group.iter_mut().zip(&SPREAD[usize::from(bits)]) {
                *x = next[usize::from(from & 15)];
            }
        });
    }

    /// Puts `zero` where no element of `start..start + out.len()` is stored.
    pub(crate) fn clear<T: Copy>(&self, start: usize, zero: T, out: &mut [T]) {
        self.groups(start, out, |bits, group| {
            for (i, x) in group.iter_mut().enumerate() {
                *x = if bits >> i & 1 != 0 { *x } else { zero };
            }
        });
    }

    /// Elements from `start` on, at most eight at a time, with their bits; bits of elements after them are 0.
    #[expect(
        clippy::inline_always,
        reason = "the loops over whole groups are unrolled with what is done there"
    )]
    #[inline(always)]
    fn groups<T>(&self, start: usize, out: &mut [T], mut f: impl FnMut(u8, &mut [T])) {
        let bytes = &self.bytes.get()[start / 8..];
        let (head, rest) = out.split_at_mut((start.next_multiple_of(8) - start).min(out.len()));
        let below = |n: usize| u8::try_from((1u16 << n) - 1).unwrap_or(u8::MAX);
        let mut bytes = bytes.iter();
        if !head.is_empty() {
            let byte = bytes.next().copied().unwrap_or(0);
            f(byte >> (start % 8) & below(head.len()), head);
        }
        let (groups, tail) = rest.as_chunks_mut::<8>();
        for (group, byte) in groups.iter_mut().zip(bytes.by_ref()) {
            f(*byte, group);
        }
        if !tail.is_empty() {
            f(bytes.next().copied().unwrap_or(0) & below(tail.len()), tail);
        }
    }

    /// Whether two masks have the same bits.
    pub(crate) fn equals(&self, other: &Mask) -> bool {
        self.bytes.get() == other.bytes.get()
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
        mask.spread(1, &[2.0, 3.0], 0.0, &mut out);
        assert_eq!(out, [0.0, 2.0, 3.0, 0.0]);
    }

    #[test]
    fn every_part_of_a_mask_is_spread_and_cleared_as_its_bits_say() {
        let bits: Vec<bool> = (0..70).map(|i| i * i % 11 < 4 || i / 8 == 3).collect();
        let mask = mask(&bits);
        for start in 0..=bits.len() {
            for end in start..=bits.len() {
                let part = start..end;
                let want: Vec<usize> = part.clone().map(|i| if bits[i] { i + 1 } else { 0 }).collect();
                let stored: Vec<usize> = want.iter().copied().filter(|v| *v > 0).collect();
                let mut out = vec![99; part.len()];
                mask.spread(start, &stored, 0, &mut out);
                assert_eq!(out, want, "{part:?}");
                let mut out: Vec<usize> = part.clone().map(|i| i + 1).collect();
                mask.clear(start, 0, &mut out);
                assert_eq!(out, want, "{part:?}");
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
