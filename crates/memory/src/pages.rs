//! Pages behind a buffer: whether they exist yet, and making them exist.
//!
//! The first write to a page costs far more than the copy into it (4 KiB pages: about eight times), so whoever
//! measures a copy must know which state the memory was in.

use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

/// The smallest page of the systems that kvbaton runs on.
const SMALLEST_PAGE: usize = 4096;

/// The share of `buffer`'s pages that exist, from 0 to 1, found at up to `probes` places; `None` where the system does
/// not say. A probe is a system call: a microsecond or two.
pub fn resident_share(buffer: &[u8], probes: usize) -> Option<f64> {
    let whole = whole_pages(buffer, page_bytes()?);
    let pages = whole.len() / page_bytes()?;
    if pages == 0 {
        return Some(1.0);
    }
    let probes = pages.min(probes.max(1));
    let mut resident = 0;
    for probe in 0..probes {
        let at = whole.start + probe * pages / probes * page_bytes()?;
        resident += usize::from(is_resident(buffer, at)?);
    }
    Some(resident as f64 / probes as f64)
}

/// Whether the page behind byte `at` of `buffer` exists; `None` where the system does not say. A system call: a microsecond
/// or two.
///
/// # Panics
///
/// When `buffer` has no such byte.
pub fn is_resident(buffer: &[u8], at: usize) -> Option<bool> {
    page_is_resident(&buffer[at], page_bytes()?)
}

/// Makes the pages of `buffer` exist, as a first write would. Its bytes stay what they are.
pub fn populate(buffer: &mut [u8]) {
    if populate_at_once(buffer) {
        return;
    }
    for byte in buffer.iter_mut().step_by(SMALLEST_PAGE) {
        // SAFETY: the byte is borrowed exclusively for as long as the atomic lives.
        let byte = unsafe { AtomicU8::from_ptr(byte) };
        // One access that writes: a read of a new page would map zeros first, and a write then fault again.
        byte.fetch_or(black_box(0), Ordering::Relaxed);
    }
}

/// Asks the system (Linux 5.14 and later) for all of them in one call.
#[cfg(target_os = "linux")]
fn populate_at_once(buffer: &mut [u8]) -> bool {
    let Some(page) = page_bytes() else { return false };
    if buffer.is_empty() {
        return true;
    }
    // Whole pages: the first and the last may hold others' bytes, which stay what they are, too.
    let start = buffer.as_ptr().addr() / page * page;
    let end = (buffer.as_ptr().addr() + buffer.len()).next_multiple_of(page);
    let first = buffer.as_mut_ptr().with_addr(start).cast();
    // SAFETY: these pages hold bytes of `buffer`, so they are mapped; the advice changes no byte.
    unsafe { libc::madvise(first, end - start, libc::MADV_POPULATE_WRITE) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn populate_at_once(_: &mut [u8]) -> bool {
    false
}

/// The part of `buffer` that starts and ends on a multiple of `size_bytes`.
fn whole_pages(buffer: &[u8], size_bytes: usize) -> Range<usize> {
    let lead = buffer.as_ptr().align_offset(size_bytes);
    if lead >= buffer.len() {
        return 0..0;
    }
    lead..lead + (buffer.len() - lead) / size_bytes * size_bytes
}

#[cfg(target_os = "linux")]
fn page_bytes() -> Option<usize> {
    // SAFETY: sysconf reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok().filter(|n| n.is_power_of_two())
}

#[cfg(not(target_os = "linux"))]
fn page_bytes() -> Option<usize> {
    None
}

/// Whether the page of `page_bytes` that holds `byte` exists.
#[cfg(target_os = "linux")]
fn page_is_resident(byte: &u8, page_bytes: usize) -> Option<bool> {
    let mut state = 0u8;
    let page = (&raw const *byte).map_addr(|address| address / page_bytes * page_bytes);
    // SAFETY: the page holds a byte that is borrowed, so it is mapped; one byte of answer is written for one page.
    let answer = unsafe { libc::mincore(page.cast_mut().cast(), 1, &raw mut state) };
    (answer == 0).then_some(state & 1 == 1)
}

#[cfg(not(target_os = "linux"))]
fn page_is_resident(_: &u8, _: usize) -> Option<bool> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::Buffer;

    #[test]
    fn populated_pages_exist_and_keep_their_bytes() {
        let mut buffer = Buffer::zeroed(8 << 20);
        buffer[4 << 20] = 7;
        populate(&mut buffer[3..(6 << 20) + 5]);
        assert_eq!(resident_share(&buffer[..6 << 20], 64), Some(1.0));
        assert_eq!(resident_share(&buffer[7 << 20..], 64), Some(0.0));
        let expected = |at: usize| if at == 4 << 20 { 7 } else { 0 };
        assert!(buffer.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
        populate(&mut []);
    }

    #[test]
    fn a_page_exists_once_it_was_written() {
        let mut buffer = Buffer::zeroed(64 << 20);
        assert_eq!(resident_share(&buffer, 64), Some(0.0));
        let half = buffer.len() / 2;
        buffer[..half].fill(1);
        assert_eq!(resident_share(&buffer, 64), Some(0.5));
    }
}
