//! The memcpy that a copy is measured against, and the most that the machine moves at all.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use kvbaton_kernels::{BoxMove, Elem, Tally, Writing, move_box};
use kvbaton_memory::Buffer;

use crate::Threads;

/// Two buffers and the time a libc memcpy takes from one to the other.
///
/// Each thread copies one contiguous share, which is the fastest a memcpy of that many bytes gets.
#[derive(Debug)]
pub struct Memcpy {
    src: Buffer,
    dst: Buffer,
}

impl Memcpy {
    /// Buffers of `len_bytes` each, the source written once, so that its pages are its own.
    pub fn new(len_bytes: usize) -> Memcpy {
        let mut src = Buffer::zeroed(len_bytes);
        src.fill(1);
        Memcpy { src, dst: Buffer::zeroed(len_bytes) }
    }

    /// Bytes read and written by one run.
    pub fn bytes_moved(&self) -> usize {
        2 * self.src.len()
    }

    /// Seconds of one run into the same destination as before: cold the first time, warm after that.
    pub fn seconds(&mut self, threads: &Threads) -> f64 {
        copy_once(&self.src, &mut self.dst, threads)
    }

    /// The most bytes a second, read and written together, that this machine was seen to move: the best of `rounds` rounds of copying
    /// contiguous memory, of reading alone and of writing alone, all into warm memory. Copies that write past the caches
    /// exceed a memcpy that does not, and those that read or write more than half of their bytes lie between.
    pub fn fastest(&mut self, threads: &Threads, rounds: usize) -> f64 {
        let len = self.src.len();
        let mut most = 0.0_f64;
        for _ in 0..rounds {
            let copied = in_shares(&self.src, &mut self.dst, threads, |src, dst| lines(src, dst, src.len()));
            let filled = in_shares(&self.src, &mut self.dst, threads, |src, dst| lines(src, dst, LINE));
            let read = in_shares(&self.src, &mut self.dst, threads, |src, _| {
                black_box(src.as_chunks::<8>().0.iter().fold(0, |sum, n| sum ^ u64::from_le_bytes(*n)));
            });
            for (bytes, seconds) in [(2 * len, copied), (len, filled), (len, read)] {
                most = most.max(bytes as f64 / seconds);
            }
        }
        most
    }

    /// Seconds of one run into memory that was never touched.
    pub fn cold_seconds(&mut self, threads: &Threads) -> f64 {
        self.dst = Buffer::zeroed(self.src.len());
        self.seconds(threads)
    }
}

/// Bytes of a line that is written again and again.
const LINE: usize = 4096;

/// Writes `dst`, in lines: the first `LINE` bytes of `src` for each of them, or all of `src` as one line of `len` bytes.
fn lines(src: &[u8], dst: &mut [u8], len: usize) {
    let len = len.min(dst.len());
    if len == 0 {
        return;
    }
    let mv = BoxMove {
        extents: [1, dst.len() / len, len],
        src_strides: [0, 0, 1],
        dst_strides: [0, len.cast_signed(), 1],
        src: Elem::U8,
        dst: Elem::U8,
    };
    let writing = Writing { past_caches: true, ..Writing::default() };
    let mut unread = Tally::default();
    // SAFETY: both slices hold a line of `len` bytes, `dst` as many as there are, and a shared and an exclusive slice cannot
    // overlap.
    unsafe { move_box(&mv, src.as_ptr(), dst.as_mut_ptr(), writing, &mut unread) };
}

/// Seconds that a libc memcpy takes from `src` to `dst`, which have the same length.
///
/// # Panics
///
/// When the lengths differ.
pub fn copy_once(src: &[u8], dst: &mut [u8], threads: &Threads) -> f64 {
    in_shares(src, dst, threads, |src, dst| {
        // SAFETY: both slices have the same length, and a shared and an exclusive slice cannot overlap. libc's memcpy is
        // called by name because it is the yardstick.
        unsafe { libc::memcpy(dst.as_mut_ptr().cast(), src.as_ptr().cast(), src.len()) };
    })
}

/// Seconds that `job` takes, done by each thread on one contiguous share of `src` and the same of `dst`.
///
/// # Panics
///
/// When the lengths differ.
fn in_shares(src: &[u8], dst: &mut [u8], threads: &Threads, job: impl Fn(&[u8], &mut [u8]) + Sync) -> f64 {
    assert_eq!(src.len(), dst.len(), "a memcpy has one length");
    let share = src.len().div_ceil(threads.count()).next_multiple_of(LINE).max(LINE);
    let parts: Vec<(&[u8], Mutex<&mut [u8]>)> =
        src.chunks(share).zip(dst.chunks_mut(share).map(Mutex::new)).collect();
    let start = Instant::now();
    threads.for_each(parts.len(), src.len(), |i| {
        let (src, dst) = &parts[i];
        let mut dst = dst.lock().unwrap_or_else(PoisonError::into_inner);
        job(src, &mut dst);
    });
    start.elapsed().as_secs_f64()
}
