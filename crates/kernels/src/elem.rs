//! How a plain element is encoded.

/// The encoding of one element of a box.
///
/// `F16`, `BF16` and `F32` convert into one another; any encoding moves unchanged into itself. The unsigned kinds carry
/// bits that nobody looks at: 16-bit rows of an unknown type move as `U16`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Elem {
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// IEEE 754 binary32.
    F32,
    /// Two's complement, one byte.
    I8,
    /// One byte, unread.
    U8,
    /// Two bytes, unread.
    U16,
    /// Four bytes, unread.
    U32,
    /// Eight bytes, unread.
    U64,
}

impl Elem {
    /// Size of one element in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Elem::I8 | Elem::U8 => 1,
            Elem::F16 | Elem::BF16 | Elem::U16 => 2,
            Elem::F32 | Elem::U32 => 4,
            Elem::U64 => 8,
        }
    }

    /// True for the encodings that convert into one another.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Elem::F16 | Elem::BF16 | Elem::F32)
    }

    /// Whether [`move_box`](crate::move_box) can write an element of this encoding as `target`.
    #[must_use]
    pub fn can_become(self, target: Elem) -> bool {
        self == target || (self.is_float() && target.is_float())
    }

    /// Whether a finite value of this encoding may round to infinity in `target`.
    #[must_use]
    pub const fn may_overflow(self, target: Elem) -> bool {
        matches!((self, target), (Elem::F32, Elem::F16 | Elem::BF16) | (Elem::BF16, Elem::F16))
    }
}
