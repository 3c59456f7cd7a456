//! The walk of a transpose, shared by every instruction set: cut the matrix into tiles whose source lines are read whole.
//!
//! A tile is gathered into a small aligned buffer first. Source lines are often a power of two apart, which maps them all
//! to the same few cache sets; reading each of them exactly once keeps that from mattering.

use std::hint::black_box;
use std::mem::MaybeUninit;

use super::Matrix;

/// Bytes of a source line that a tile takes: a cache line.
pub(super) const LINE: usize = 64;

/// Tiles of a block, along the side on which lines are far apart and along the other. Distant lines lie in as many pages:
/// a block visits each several times while its translation is at hand. Distant source lines are followed far, as nothing
/// else is kept of them. Where the destination's are distant, the source lines of a block are read again for each of the
/// tiles that they cross: few enough to stay in a first-level cache.
const FAR_SOURCE: (usize, usize) = (8, 16);
const FAR_DESTINATION: (usize, usize) = (8, 4);

/// How many tiles before its use a source line is asked for: pages are more than the hardware's own prefetchers follow.
const AHEAD: usize = 3;

/// Asks for a cache line. A hint: `at` may point anywhere.
#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of any address is harmless.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The gathered source of a tile: `ROWS` lines.
#[repr(C, align(64))]
pub(super) struct Gathered<const ROWS: usize>(pub [[u8; LINE]; ROWS]);

/// Applies `|v| round` to `v` once for every `+`, as straight code: a loop would keep the registers in memory.
///
/// A round of a transpose interleaves line n with line n + half, which rotates the bits of (line, lane) by one; after
/// log2(lines) rounds line and lane have changed places.
macro_rules! rounds {
    ([], $v:expr, |$name:ident| $round:expr) => { $v };
    ([+ $($more:tt)*], $v:expr, |$name:ident| $round:expr) => {{
        let $name = $v;
        rounds!([$($more)*], $round, |$name| $round)
    }};
}
pub(super) use rounds;

/// Transposes `m`, elements of `BYTES` bytes, in tiles of `ROWS` lines of [`LINE`] bytes.
///
/// `tile` turns gathered lines into `LINE / BYTES` lines of `ROWS` elements at a pointer and a stride.
///
/// # Safety
///
/// As for [`super::Cpu::transpose`]; `tile` writes those lines and nothing else.
#[inline(always)]
pub(super) unsafe fn walk<const ROWS: usize, const BYTES: usize>(
    m: Matrix,
    tile: impl Fn(&Gathered<ROWS>, *mut u8, isize),
) {
    let cols = LINE / BYTES;
    // Tiles of a block run along the side whose lines are closer together, so that the pages of the other side are
    // visited by one tile after the other.
    let rows_first = m.src_stride.unsigned_abs() < m.dst_stride.unsigned_abs();
    let (slow_side, fast_side) = if rows_first { FAR_DESTINATION } else { FAR_SOURCE };
    let tiles = slow_side * fast_side;
    let (block_rows, block_cols) = if rows_first { (fast_side, slow_side) } else { (slow_side, fast_side) };
    let (block_rows, block_cols) = (block_rows * ROWS, block_cols * cols);
    let place = |step: usize| {
        let (slow, fast) = (step / fast_side, step % fast_side);
        let (r, c) = if rows_first { (fast, slow) } else { (slow, fast) };
        (r * ROWS, c * cols)
    };
    let at = |row: usize, col: usize| {
        m.src.wrapping_offset(row.cast_signed() * m.src_stride + (col * BYTES).cast_signed())
    };
    for block_col in (0..m.cols).step_by(block_cols) {
        for block_row in (0..m.rows).step_by(block_rows) {
            let next_block = if block_row + block_rows < m.rows {
                (block_row + block_rows, block_col)
            } else {
                (0, block_col + block_cols)
            };
            for step in 0..tiles {
                let (r, c) = place(step);
                let (row, col) = (block_row + r, block_col + c);
                if row >= m.rows || col >= m.cols {
                    continue;
                }
                let (r, c) = place((step + AHEAD) % tiles);
                let ahead = if step + AHEAD < tiles {
                    at(block_row + r, block_col + c)
                } else {
                    at(next_block.0 + r, next_block.1 + c)
                };
                // SAFETY: `row` and `col` lie inside the matrix.
                unsafe { one_tile::<ROWS, BYTES>(m, row, col, ahead, &tile) }
            }
        }
    }
}

/// Transposes the tile at `row` and `col`, or the part of it that lies inside the matrix. Asks for the lines of the tile
/// at `ahead`.
///
/// # Safety
///
/// As for [`walk`], with `row` and `col` inside the matrix.
#[inline(always)]
unsafe fn one_tile<const ROWS: usize, const BYTES: usize>(
    m: Matrix,
    row: usize,
    col: usize,
    ahead: *const u8,
    tile: &impl Fn(&Gathered<ROWS>, *mut u8, isize),
) {
    let rows = ROWS.min(m.rows - row);
    let cols = (LINE / BYTES).min(m.cols - col);
    // SAFETY: `[row, row + rows) × [col, col + cols)` lies inside the matrix, on both sides.
    unsafe {
        let src = m.src.offset(row.cast_signed() * m.src_stride + (col * BYTES).cast_signed());
        let dst = m.dst.offset(col.cast_signed() * m.dst_stride + (row * BYTES).cast_signed());
        let line = |r: usize| src.offset(r.cast_signed() * m.src_stride);
        let mut gathered = MaybeUninit::<Gathered<ROWS>>::uninit();
        let lines = gathered.as_mut_ptr().cast::<[u8; LINE]>();
        if rows == ROWS && cols == LINE / BYTES {
            // Hidden from the compiler, which would compute all multiples of the stride ahead of the walk and then load
            // them from memory, one for every line.
            let stride = black_box(m.src_stride);
            let (mut from, mut ahead) = (src, ahead);
            for r in 0..ROWS {
                lines.add(r).cast::<u8>().copy_from_nonoverlapping(from, LINE);
                prefetch(ahead);
                from = from.wrapping_offset(stride);
                ahead = ahead.wrapping_offset(stride);
            }
            // All `ROWS` lines have been written.
            tile(gathered.assume_init_ref(), dst, m.dst_stride);
        } else {
            lines.write_bytes(0, ROWS);
            for r in 0..rows {
                lines.add(r).cast::<u8>().copy_from_nonoverlapping(line(r), cols * BYTES);
            }
            // A tile that sticks out of the matrix is written here first. Its lines are at most `LINE` bytes.
            let mut whole = Gathered([[0; LINE]; LINE]);
            tile(gathered.assume_init_ref(), whole.0.as_mut_ptr().cast(), LINE.cast_signed());
            for (c, from) in whole.0[..cols].iter().enumerate() {
                let to = dst.offset(c.cast_signed() * m.dst_stride);
                to.copy_from_nonoverlapping(from.as_ptr(), rows * BYTES);
            }
        }
    }
}
