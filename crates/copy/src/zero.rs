//! Zeroing what a copy leaves.

use std::sync::Mutex;

use crate::Threads;

/// Pieces that threads share.
const PIECE_BYTES: usize = 1 << 20;

/// Zeroes all of `ranges`, on all threads.
pub fn zero(ranges: Vec<&mut [u8]>, threads: &Threads) {
    let bytes = ranges.iter().map(|r| r.len()).sum();
    let pieces: Vec<Mutex<&mut [u8]>> =
        ranges.into_iter().flat_map(|r| r.chunks_mut(PIECE_BYTES)).map(Mutex::new).collect();
    threads.for_each(pieces.len(), bytes, |i| pieces[i].lock().unwrap_or_else(|e| e.into_inner()).fill(0));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_ranges_are_zeroed() {
        let mut bytes = vec![7u8; (3 << 20) + 11];
        let (first, rest) = bytes.split_at_mut(5);
        let (_, rest) = rest.split_at_mut(2);
        let (second, _) = rest.split_at_mut((2 << 20) + 1);
        zero(vec![first, second], &Threads::new(2));
        let zeros = bytes.iter().filter(|b| **b == 0).count();
        assert_eq!(zeros, 5 + (2 << 20) + 1);
        assert_eq!((bytes[4], bytes[5], bytes[6], bytes[7]), (0, 7, 7, 0));
    }
}
