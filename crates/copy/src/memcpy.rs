//! The memcpy that a copy is measured against.

use std::time::Instant;

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

    /// Seconds of one run into memory that was never touched.
    pub fn cold_seconds(&mut self, threads: &Threads) -> f64 {
        self.dst = Buffer::zeroed(self.src.len());
        self.seconds(threads)
    }
}

/// Seconds that a libc memcpy takes from `src` to `dst`, which have the same length.
///
/// # Panics
///
/// When the lengths differ.
pub fn copy_once(src: &[u8], dst: &mut [u8], threads: &Threads) -> f64 {
    assert_eq!(src.len(), dst.len(), "a memcpy has one length");
    let share = src.len().div_ceil(threads.count()).next_multiple_of(4096).max(4096);
    let parts: Vec<(&[u8], std::sync::Mutex<&mut [u8]>)> =
        src.chunks(share).zip(dst.chunks_mut(share).map(std::sync::Mutex::new)).collect();
    let start = Instant::now();
    threads.for_each(parts.len(), src.len(), |i| {
        let (src, dst) = &parts[i];
        let mut dst = dst.lock().unwrap_or_else(|e| e.into_inner());
        // SAFETY: both slices have the same length (they are the same chunk of buffers of one length) and a shared
        // and an exclusive slice cannot overlap. libc's memcpy is called by name because it is the yardstick.
        unsafe { libc::memcpy(dst.as_mut_ptr().cast(), src.as_ptr().cast(), src.len()) };
    });
    start.elapsed().as_secs_f64()
}
