//! What a conversion met that a cache should not hold.

/// What a narrowing conversion does with a finite value that the target cannot hold.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OnOverflow {
    /// Write infinity and count it; the caller turns a non-zero count into an error and hands nothing out.
    #[default]
    Error,
    /// Write the largest finite value of the same sign and count it.
    Clamp,
    /// Write infinity, as IEEE rounding does, and count it.
    Count,
}

/// Counts of unusual values, with the place of the first of each kind.
///
/// A place is an index into the box, `[head, row, lane]`; "first" is the smallest in that order, so it does not depend on
/// the order in which a kernel visits the box or in which threads finish.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tally {
    /// Finite values that the target cannot hold.
    pub overflow: u64,
    /// Source values that are not a number.
    pub nan: u64,
    /// Source values that are infinite.
    pub infinity: u64,
    /// First place counted in `overflow`.
    pub first_overflow: Option<[usize; 3]>,
    /// First place counted in `nan`.
    pub first_nan: Option<[usize; 3]>,
    /// First place counted in `infinity`.
    pub first_infinity: Option<[usize; 3]>,
}

impl Tally {
    /// The first place of any kind.
    #[must_use]
    pub fn first(&self) -> Option<[usize; 3]> {
        earliest(earliest(self.first_overflow, self.first_nan), self.first_infinity)
    }

    /// True when nothing was counted.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.overflow == 0 && self.nan == 0 && self.infinity == 0
    }

    /// Adds the counts of another part of the same box, and keeps the earlier places.
    pub fn merge(&mut self, other: &Tally) {
        self.overflow += other.overflow;
        self.nan += other.nan;
        self.infinity += other.infinity;
        self.first_overflow = earliest(self.first_overflow, other.first_overflow);
        self.first_nan = earliest(self.first_nan, other.first_nan);
        self.first_infinity = earliest(self.first_infinity, other.first_infinity);
    }

    /// The same counts with every place moved by `origin`: from an index into a part to one into the whole.
    #[must_use]
    pub fn offset_by(mut self, origin: [usize; 3]) -> Tally {
        let places = [&mut self.first_overflow, &mut self.first_nan, &mut self.first_infinity];
        for place in places.into_iter().flatten() {
            for (axis, start) in place.iter_mut().zip(origin) {
                *axis += start;
            }
        }
        self
    }

    /// Counts one converted element: `source` as it was read, `overflowed` when it is finite and the target is not.
    pub(crate) fn note(&mut self, source: f32, overflowed: bool, place: [usize; 3]) {
        let (count, first) = if source.is_nan() {
            (&mut self.nan, &mut self.first_nan)
        } else if source.is_infinite() {
            (&mut self.infinity, &mut self.first_infinity)
        } else if overflowed {
            (&mut self.overflow, &mut self.first_overflow)
        } else {
            return;
        };
        *count += 1;
        *first = earliest(*first, Some(place));
    }
}

fn earliest(a: Option<[usize; 3]>, b: Option<[usize; 3]>) -> Option<[usize; 3]> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_adds_counts_and_keeps_the_earlier_place() {
        let mut a = Tally { nan: 2, first_nan: Some([1, 0, 5]), ..Tally::default() };
        let b =
            Tally { nan: 1, first_nan: Some([0, 9, 9]), overflow: 4, first_overflow: Some([2, 0, 0]), ..a };
        a.merge(&b);
        assert_eq!((a.nan, a.overflow, a.infinity), (3, 4, 0));
        assert_eq!(
            (a.first_nan, a.first_overflow, a.first_infinity),
            (Some([0, 9, 9]), Some([2, 0, 0]), None)
        );
        assert_eq!(a.first(), Some([0, 9, 9]));
    }

    #[test]
    fn places_move_with_their_origin() {
        let part = Tally { infinity: 1, first_infinity: Some([0, 2, 3]), ..Tally::default() };
        assert_eq!(part.offset_by([4, 10, 0]).first_infinity, Some([4, 12, 3]));
    }
}
