//! Pages behind a buffer: whether they exist yet, and how large they may be.
//!
//! The first write to a page costs far more than the copy into it (4 KiB pages: about eight times), so whoever
//! measures a copy must know which state the memory was in, and whoever makes one wants large pages.

use std::ops::Range;

/// Huge pages of x86-64 and of aarch64 with 4 KiB base pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Asks the system for huge pages where `buffer` covers whole ones, and says whether it agreed for any.
///
/// It may grant fewer than it agrees to. Contents are kept. Only Linux knows the request.
pub fn advise_huge_pages(buffer: &mut [u8]) -> bool {
    let whole = whole_pages(buffer, HUGE_PAGE_BYTES);
    if whole.is_empty() {
        return false;
    }
    #[cfg(target_os = "linux")]
    {
        let start = buffer[whole.start..].as_mut_ptr();
        // SAFETY: the range lies within `buffer`, starts on a page and is exclusively borrowed. MADV_HUGEPAGE changes
        // how memory is mapped, not what it holds.
        unsafe { libc::madvise(start.cast(), whole.len(), libc::MADV_HUGEPAGE) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    {
        false
    }
}

/// Whether the system has huge pages for `len_bytes` bytes free right now. Where it has not, a huge page is made by
/// moving others out of the way at the first write, which can take longer than all small pages together.
pub fn huge_pages_at_hand(len_bytes: usize) -> bool {
    std::fs::read_to_string("/proc/buddyinfo").is_ok_and(|text| free_huge_bytes(&text) >= len_bytes)
}

/// Bytes in free blocks of a huge page and more. After the zone's name, column `n` of a line counts free blocks of
/// 2ⁿ base pages of 4 KiB.
fn free_huge_bytes(buddyinfo: &str) -> usize {
    let of_zone = |line: &str| {
        let counts = line.split_once("zone").map_or("", |(_, rest)| rest).split_whitespace().skip(1);
        let bytes = counts
            .enumerate()
            .filter(|(order, _)| *order >= 9)
            .map(|(order, count)| count.parse::<usize>().unwrap_or(0).saturating_mul(4096 << order));
        bytes.sum::<usize>()
    };
    buddyinfo.lines().map(of_zone).sum()
}

/// The share of `buffer`'s pages that exist, from 0 to 1, found at up to 64 places; `None` where the system does
/// not say.
pub fn resident_share(buffer: &[u8]) -> Option<f64> {
    let whole = whole_pages(buffer, page_bytes()?);
    let pages = whole.len() / page_bytes()?;
    if pages == 0 {
        return Some(1.0);
    }
    let probes = pages.min(64);
    let mut resident = 0;
    for probe in 0..probes {
        let at = whole.start + probe * pages / probes * page_bytes()?;
        resident += usize::from(is_resident(&buffer[at..])?);
    }
    Some(resident as f64 / probes as f64)
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

/// Whether the page that `buffer` starts with exists.
#[cfg(target_os = "linux")]
fn is_resident(buffer: &[u8]) -> Option<bool> {
    let mut state = 0u8;
    // SAFETY: the address starts a page of mapped memory (`whole_pages`), and one byte of answer is written for one
    // page.
    let answer = unsafe { libc::mincore(buffer.as_ptr().cast_mut().cast(), 1, &raw mut state) };
    (answer == 0).then_some(state & 1 == 1)
}

#[cfg(not(target_os = "linux"))]
fn is_resident(_: &[u8]) -> Option<bool> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::Buffer;

    #[test]
    fn a_page_exists_once_it_was_written() {
        let mut buffer = Buffer::zeroed(64 << 20);
        assert_eq!(resident_share(&buffer), Some(0.0));
        let half = buffer.len() / 2;
        buffer[..half].fill(1);
        assert_eq!(resident_share(&buffer), Some(0.5));
    }

    #[test]
    fn blocks_of_a_huge_page_and_more_are_counted() {
        let text = "Node 0, zone      DMA      1      0      0      1      2      1      1      0      1      1      3\n\
                    Node 0, zone   Normal   9000    100     90     80     70     60     50     40     30      2      1\n";
        assert_eq!(free_huge_bytes(text), (1 + 2) * (2 << 20) + (3 + 1) * (4 << 20));
        assert_eq!(free_huge_bytes("nonsense"), 0);
    }

    #[test]
    fn advice_keeps_the_contents() {
        let mut buffer = Buffer::zeroed(8 << 20);
        buffer[5_000_000] = 7;
        // Systems without huge pages say no; either way nothing changes.
        advise_huge_pages(&mut buffer);
        assert_eq!((buffer[5_000_000], buffer[4_999_999]), (7, 0));
        assert!(!advise_huge_pages(&mut buffer[..4096]));
    }
}
