//! Matrix products whose result does not depend on how they are cut.
//!
//! Every element of a product is one chain of fused multiply-adds over `k` in ascending order, starting from 0.
//! Blocking, threads and instruction sets change nothing; leaving out trailing `k` whose left factors are all
//! zero changes nothing either (their right factors being finite). That is what lets attention run by blocks of
//! rows, skip what a mask hides, and still equal the plain product bit for bit.
//!
//! A single row (`m = 1`) is the exception: it is bound by reading the weights, and sums in sixteen lanes, unless sums
//! are kept in fp16 (see [`Isa::with_half_sums`]).
//!
//! The right factor is packed into panels of [`Lanes::COLUMNS`] columns, `k` outermost, widened to `f32`; the left
//! factor is read where it is.

use super::lanes::{Kernel, LANES, Lanes};
use super::{HALF_SUM_TERMS, Isa, Source};
use half::f16;
use rayon::prelude::*;

/// Rows of `k` between two visits of the result: a panel of it stays in the second-level cache.
const K_BLOCK: usize = 640;
/// Panels a parallel task takes at most: together they stay in the second-level cache.
const PANELS: usize = 6;
/// Rows of the left factor a parallel task takes at most.
const ROW_CHUNK: usize = 512;

/// A right factor: `n` columns of `k` values.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// The values: [`Source::Singles`] or [`Source::Halves`].
    pub values: Source<'a>,
    /// Values (the depth) in each column.
    pub k: usize,
    /// Columns.
    pub n: usize,
    /// Elements from a value to the next in its column.
    pub k_stride: usize,
    /// Elements from a column to the next.
    pub n_stride: usize,
}

impl Matrix<'_> {
    fn assert_inside(&self) {
        let have = match self.values {
            Source::Singles(s) => s.len(),
            Source::Halves(s) => s.len(),
            Source::Scalar(_) | Source::Destination => 0,
        };
        let end = if self.k == 0 || self.n == 0 {
            0
        } else {
            (self.k - 1) * self.k_stride + (self.n - 1) * self.n_stride + 1
        };
        assert!(end <= have, "a {}×{} matrix reaches element {end} of {have}", self.k, self.n);
    }

    #[inline(always)]
    fn get(&self, p: usize, j: usize) -> f32 {
        let at = p * self.k_stride + j * self.n_stride;
        match self.values {
            Source::Singles(s) => s[at],
            Source::Halves(s) => s[at].to_f32(),
            Source::Scalar(_) | Source::Destination => 0.0,
        }
    }

    /// Sixteen values from element `at` on.
    #[inline(always)]
    fn lanes<L: Lanes>(&self, l: L, at: usize) -> L::V {
        match self.values {
            Source::Singles(s) => l.load(s[at..].first_chunk().expect("inside, see assert_inside")),
            Source::Halves(s) => l.load_half(s[at..].first_chunk().expect("inside, see assert_inside")),
            Source::Scalar(_) | Source::Destination => l.splat(0.0),
        }
    }

    /// Packs columns `from..from + columns` (those past `n` become 0) of depths `depths` into `panel`,
    /// `[depth][columns]`.
    #[inline(always)]
    fn pack<L: Lanes>(
        &self,
        l: L,
        from: usize,
        columns: usize,
        depths: std::ops::Range<usize>,
        panel: &mut [f32],
    ) {
        let valid = columns.min(self.n - from);
        for c0 in (0..columns).step_by(LANES) {
            let width = LANES.min(valid.saturating_sub(c0));
            let whole = width == LANES;
            let mut p = depths.start;
            if whole && self.k_stride == 1 {
                while p + LANES <= depths.end {
                    let mut rows = [l.splat(0.0); LANES];
                    for (j, row) in rows.iter_mut().enumerate() {
                        *row = self.lanes(l, p + (from + c0 + j) * self.n_stride);
                    }
                    let turned = l.transpose(rows);
                    for (i, v) in turned.into_iter().enumerate() {
                        let at = (p - depths.start + i) * columns + c0;
                        l.store(v, panel[at..].first_chunk_mut().expect("panel holds all depths"));
                    }
                    p += LANES;
                }
            } else if whole && self.n_stride == 1 {
                while p < depths.end {
                    let v = self.lanes(l, p * self.k_stride + from + c0);
                    let at = (p - depths.start) * columns + c0;
                    l.store(v, panel[at..].first_chunk_mut().expect("panel holds all depths"));
                    p += 1;
                }
            }
            for p in p..depths.end {
                let at = (p - depths.start) * columns + c0;
                for (j, x) in panel[at..at + LANES].iter_mut().enumerate() {
                    *x = if j < width { self.get(p, from + c0 + j) } else { 0.0 };
                }
            }
        }
    }
}

/// A left factor's rows, one every `stride` elements.
#[derive(Clone, Copy)]
struct Rows<'a> {
    values: &'a [f32],
    stride: usize,
    count: usize,
}

/// Where results go: rows of a matrix of which the caller owns the columns it names.
#[derive(Clone, Copy)]
struct Target {
    start: *mut f32,
    stride: usize,
}

// SAFETY: a `Target` is only used through `row`, whose contract makes every access exclusive.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Target {
    /// Columns `at..at + len` of row `i`.
    ///
    /// # Safety
    ///
    /// They lie inside the matrix, and nobody else reads or writes them while the slice lives.
    #[inline(always)]
    unsafe fn row<'a>(self, i: usize, at: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.stride + at), len) }
    }
}

/// What happens to a finished sum.
#[derive(Clone, Copy)]
struct Finish<'a> {
    bias: Option<&'a [f32]>,
    half: bool,
    /// The sum is rounded to fp16 as it grows, and before the bias.
    half_sums: bool,
}

impl<'a> Finish<'a> {
    fn new(isa: Isa, bias: Option<&'a [f32]>, half: bool) -> Finish<'a> {
        Finish { bias, half, half_sums: half && isa.has_half_sums() }
    }

    /// Depths between two visits of the result, of `k`.
    fn block(self, k: usize) -> usize {
        if self.half_sums { HALF_SUM_TERMS.min(k.max(1)) } else { balanced(k) }
    }

    /// What happens to sums up to a depth: all of it to the last ones, rounding to all of them if they are kept in
    /// fp16.
    fn at(self, last: bool) -> Option<Finish<'a>> {
        match (last, self.half_sums) {
            (true, _) => Some(self),
            (false, true) => Some(Finish { bias: None, ..self }),
            (false, false) => None,
        }
    }
}

/// Several panels, one after the other, of which each is `[depth][columns]` and `stride` values long.
#[derive(Clone, Copy)]
struct PanelRun<'a> {
    values: &'a [f32],
    stride: usize,
    /// The first column.
    at: usize,
    /// Columns, the last panel's filling left out.
    width: usize,
}

/// Multiplies rows by panels: every tile of rows, which then stays in the first-level cache, by every panel.
///
/// # Safety
///
/// Columns `run.at..run.at + run.width` of rows `0..rows.count` of `target` belong to this call alone.
#[inline(always)]
unsafe fn multiply_rows<L: Lanes>(
    l: L,
    rows: Rows<'_>,
    depths: std::ops::Range<usize>,
    run: PanelRun<'_>,
    target: Target,
    finish: Option<Finish<'_>>,
) {
    let mut first = 0;
    while first < rows.count {
        let left = rows.count - first;
        let count = if L::COLUMNS == 2 * LANES {
            // SAFETY: the caller's promise; the tile's rows are below `rows.count`.
            unsafe {
                match left {
                    12.. => tiles::<L, 12, 2>(l, rows, first, &depths, run, target, finish),
                    8.. => tiles::<L, 8, 2>(l, rows, first, &depths, run, target, finish),
                    4.. => tiles::<L, 4, 2>(l, rows, first, &depths, run, target, finish),
                    _ => tiles::<L, 1, 2>(l, rows, first, &depths, run, target, finish),
                }
            }
        } else {
            // SAFETY: as above.
            unsafe {
                match left {
                    6.. => tiles::<L, 6, 1>(l, rows, first, &depths, run, target, finish),
                    4.. => tiles::<L, 4, 1>(l, rows, first, &depths, run, target, finish),
                    _ => tiles::<L, 1, 1>(l, rows, first, &depths, run, target, finish),
                }
            }
        };
        first += count;
    }
}

/// `R` rows from `first` on times every panel of the run, `C`·16 columns each; returns `R`.
///
/// # Safety
///
/// As [`multiply_rows`], and `first + R <= rows.count`.
#[inline(always)]
unsafe fn tiles<L: Lanes, const R: usize, const C: usize>(
    l: L,
    rows: Rows<'_>,
    first: usize,
    depths: &std::ops::Range<usize>,
    run: PanelRun<'_>,
    target: Target,
    finish: Option<Finish<'_>>,
) -> usize {
    let mut left: [&[f32]; R] = [&[]; R];
    for (i, row) in left.iter_mut().enumerate() {
        let start = (first + i) * rows.stride;
        *row = &rows.values[start + depths.start..start + depths.end];
    }
    for (i, c0) in (0..run.width).step_by(C * LANES).enumerate() {
        let panel = &run.values[i * run.stride..][..depths.len() * C * LANES];
        let width = (C * LANES).min(run.width - c0);
        // SAFETY: the columns lie in the run, the rows below `rows.count`.
        unsafe {
            tile::<L, R, C>(l, left, panel, target, first, run.at + c0, width, depths.start > 0, finish)
        };
    }
    R
}

/// One tile: the inner loop. `add`: the target holds the sums so far.
///
/// # Safety
///
/// Columns `at..at + width` of rows `first..first + R` of `target` belong to this call alone.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the inner loop has one caller")]
unsafe fn tile<L: Lanes, const R: usize, const C: usize>(
    l: L,
    left: [&[f32]; R],
    panel: &[f32],
    target: Target,
    first: usize,
    at: usize,
    width: usize,
    add: bool,
    finish: Option<Finish<'_>>,
) {
    let depth = panel.len() / (C * LANES);
    assert!(left.iter().all(|row| row.len() == depth), "rows are as deep as the panel");
    let mut acc = [[l.splat(0.0); C]; R];
    if add {
        for (i, acc) in acc.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let so_far = unsafe { target.row(first + i, at, width) };
            for (c, v) in acc.iter_mut().enumerate() {
                let from = (c * LANES).min(width);
                *v = match so_far[from..].first_chunk() {
                    Some(full) => l.load(full),
                    None => l.load_part(&so_far[from..], 0.0),
                };
            }
        }
    }
    for p in 0..depth {
        let mut columns = [l.splat(0.0); C];
        for (c, column) in columns.iter_mut().enumerate() {
            // SAFETY: `panel` holds `depth * C * 16` values, and p < depth.
            let v = unsafe { &*panel.as_ptr().add((p * C + c) * LANES).cast::<[f32; LANES]>() };
            *column = l.load(v);
        }
        for i in 0..R {
            // SAFETY: every row has `depth` values, asserted above, and p < depth.
            let x = l.splat(unsafe { *left[i].get_unchecked(p) });
            for c in 0..C {
                acc[i][c] = l.fma(x, columns[c], acc[i][c]);
            }
        }
    }
    for (i, acc) in acc.iter().enumerate() {
        // SAFETY: the caller's promise.
        let out = unsafe { target.row(first + i, at, width) };
        for (c, &v) in acc.iter().enumerate() {
            let from = (c * LANES).min(width);
            let out = &mut out[from..(from + LANES).min(width)];
            let mut v = v;
            if let Some(f) = finish {
                if f.half_sums {
                    v = l.round_half(v);
                }
                if let Some(b) = f.bias {
                    v = l.add(v, l.load_part(&b[at + from..at + from + out.len()], 0.0));
                }
                if f.half {
                    v = l.round_half(v);
                }
            }
            match out.first_chunk_mut::<LANES>() {
                Some(out) => l.store(v, out),
                None => l.store_part(v, out),
            }
        }
    }
}

/// A product `left × right`, `[m, k] × [k, n]`.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// The left factor, row after row.
    pub left: &'a [f32],
    /// Elements from a row of `left` to the next.
    pub left_stride: usize,
    /// Rows.
    pub m: usize,
    /// The right factor.
    pub right: Matrix<'a>,
    /// Added to every row of the result.
    pub bias: Option<&'a [f32]>,
    /// Round the result to fp16.
    pub half: bool,
}

/// Writes `product` to `out`, `[m, n]` packed, with the threads of the current rayon pool. The right factor is
/// widened panel by panel, never as a whole.
///
/// # Panics
///
/// When a factor, the bias or `out` does not hold what its dimensions say.
pub fn multiply(isa: Isa, product: &Product<'_>, out: &mut [f32]) {
    assert_eq!(out.len(), product.m * product.right.n, "out holds m × n values");
    multiply_into(isa, product, out, product.right.n);
}

/// As [`multiply`], into columns of a wider matrix: rows of the result lie `out_stride` values apart.
///
/// # Panics
///
/// When a factor, the bias or `out` does not hold what its dimensions say.
pub fn multiply_into(isa: Isa, product: &Product<'_>, out: &mut [f32], out_stride: usize) {
    let Product { left, left_stride, m, right, bias, half } = *product;
    let (k, n) = (right.k, right.n);
    right.assert_inside();
    assert!(
        m == 0 || (n <= out_stride && (m - 1) * out_stride + n <= out.len()),
        "out holds m rows of n values"
    );
    assert!(m == 0 || k == 0 || (m - 1) * left_stride + k <= left.len(), "left holds m rows of k values");
    assert!(bias.is_none_or(|b| b.len() == n), "the bias has n values");
    if m == 0 || n == 0 {
        return;
    }
    let finish = Finish::new(isa, bias, half);
    if m == 1 && right.k_stride == 1 && !finish.half_sums {
        return single_row(isa, &left[..k], &right, bias, half, &mut out[..n]);
    }
    let columns = isa.run(Columns);
    let panels = n.div_ceil(columns);
    // Several panels a task read the left factor from far away once; a few tasks a thread even out the work.
    let group = (panels / (3 * rayon::current_num_threads())).clamp(1, PANELS);
    let groups = panels.div_ceil(group);
    let chunks = m.div_ceil(ROW_CHUNK);
    let target = Target { start: out.as_mut_ptr(), stride: out_stride };
    (0..groups * chunks).into_par_iter().with_max_len(1).for_each_init(Vec::new, |scratch, task| {
        let (at, first) = (task / chunks * group * columns, task % chunks * ROW_CHUNK);
        let width = (group * columns).min(n - at);
        let count = ROW_CHUNK.min(m - first);
        let rows = Rows { values: &left[first * left_stride..], stride: left_stride, count };
        let target = Target { start: target.row_start(first), ..target };
        isa.run(TaskKernel { right, rows, target, at, width, finish, scratch });
    });
}

impl Target {
    fn row_start(self, i: usize) -> *mut f32 {
        self.start.wrapping_add(i * self.stride)
    }
}

struct Columns;

impl Kernel for Columns {
    type Out = usize;

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> usize {
        L::COLUMNS
    }
}

/// A few panels of columns times one chunk of rows; made by [`multiply`] only.
struct TaskKernel<'a> {
    right: Matrix<'a>,
    rows: Rows<'a>,
    target: Target,
    at: usize,
    width: usize,
    finish: Finish<'a>,
    scratch: &'a mut Vec<f32>,
}

impl Kernel for TaskKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let TaskKernel { right, rows, target, at, width, finish, scratch } = self;
        let block = finish.block(right.k);
        let stride = block * L::COLUMNS;
        scratch.resize(width.div_ceil(L::COLUMNS) * stride, 0.0);
        let mut start = 0;
        loop {
            let end = (start + block).min(right.k);
            for (i, c0) in (0..width).step_by(L::COLUMNS).enumerate() {
                right.pack(l, at + c0, L::COLUMNS, start..end, &mut scratch[i * stride..][..stride]);
            }
            let finish = finish.at(end == right.k);
            let run = PanelRun { values: scratch, stride, at, width };
            // SAFETY: tasks of `multiply` differ in their columns or in their rows, each inside `out`.
            unsafe { multiply_rows(l, rows, start..end, run, target, finish) };
            start = end;
            if start == right.k {
                break;
            }
        }
    }
}

/// Equal blocks of at most [`K_BLOCK`], a multiple of the lanes unless it is all.
fn balanced(k: usize) -> usize {
    let blocks = k.div_ceil(K_BLOCK).max(1);
    k.div_ceil(blocks).next_multiple_of(LANES).min(k.max(1))
}

/// A right factor packed as a whole, for products with many blocks of rows.
#[derive(Debug, Default)]
pub struct Panels {
    values: Vec<f32>,
    k: usize,
    n: usize,
    columns: usize,
}

impl Panels {
    /// Packs `matrix`, reusing the memory of `self`.
    ///
    /// # Panics
    ///
    /// When the matrix reaches past its values.
    pub fn pack(&mut self, isa: Isa, matrix: &Matrix<'_>) {
        matrix.assert_inside();
        self.columns = isa.run(Columns);
        (self.k, self.n) = (matrix.k, matrix.n);
        let panel = self.k * self.columns;
        self.values.resize(self.n.div_ceil(self.columns) * panel, 0.0);
        isa.run(PackKernel { matrix: *matrix, values: &mut self.values });
    }

    /// Writes `left × self` to `out` with the calling thread: the first `k` values of each row, the first `n`
    /// columns. Rows of `left` and `out` lie `left_stride` and `out_stride` apart.
    ///
    /// # Panics
    ///
    /// When `k` or `n` exceed the packed matrix, or a slice does not hold `m` rows.
    #[expect(clippy::too_many_arguments, reason = "a matrix product has this many sizes")]
    pub fn multiply(
        &self,
        isa: Isa,
        left: &[f32],
        left_stride: usize,
        m: usize,
        k: usize,
        n: usize,
        out: &mut [f32],
        out_stride: usize,
        half: bool,
    ) {
        assert!(
            k <= self.k && n <= self.n,
            "the packed matrix is [{}, {}], asked [{k}, {n}]",
            self.k,
            self.n
        );
        if m == 0 || n == 0 {
            return;
        }
        assert!(k == 0 || (m - 1) * left_stride + k <= left.len(), "left holds m rows of k values");
        assert!(n <= out_stride && (m - 1) * out_stride + n <= out.len(), "out holds m rows of n values");
        let rows = Rows { values: left, stride: left_stride, count: m };
        let target = Target { start: out.as_mut_ptr(), stride: out_stride };
        isa.run(RowsKernel { panels: self, rows, k, n, target, finish: Finish::new(isa, None, half) });
    }
}

impl Panels {
    /// The largest Euclidean norm of a column, up to rounding; NaN or infinite when a value is.
    pub fn largest_norm(&self, isa: Isa) -> f32 {
        isa.run(NormKernel(self))
    }

    /// Whether every value is finite.
    pub fn is_finite(&self, isa: Isa) -> bool {
        super::reduce(isa, super::Reduction::SumOfFinite, &self.values) == 0.0
    }
}

struct NormKernel<'a>(&'a Panels);

impl Kernel for NormKernel<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> f32 {
        let Panels { values, k, columns, .. } = self.0;
        let mut largest = 0.0f32;
        for panel in values.chunks_exact((k * columns).max(1)) {
            for c in (0..*columns).step_by(LANES) {
                let mut squares = l.splat(0.0);
                for p in 0..*k {
                    let v = panel[p * columns + c..].first_chunk().expect("a panel holds k rows of columns");
                    let v = l.load(v);
                    squares = l.fma(v, v, squares);
                }
                for s in l.to_array(squares) {
                    // Not `max`, which drops a NaN.
                    largest = if s > largest || s.is_nan() { s } else { largest };
                }
            }
        }
        largest.sqrt()
    }
}

struct PackKernel<'a> {
    matrix: Matrix<'a>,
    values: &'a mut [f32],
}

impl Kernel for PackKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let k = self.matrix.k;
        if k == 0 {
            return;
        }
        for (i, panel) in self.values.chunks_exact_mut(k * L::COLUMNS).enumerate() {
            self.matrix.pack(l, i * L::COLUMNS, L::COLUMNS, 0..k, panel);
        }
    }
}

/// Made by [`Panels::multiply`] only.
struct RowsKernel<'a> {
    panels: &'a Panels,
    rows: Rows<'a>,
    k: usize,
    n: usize,
    target: Target,
    finish: Finish<'a>,
}

impl Kernel for RowsKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let RowsKernel { panels, rows, k, n, target, finish } = self;
        assert_eq!(panels.columns, L::COLUMNS, "packed for the instruction set that multiplies");
        let block = finish.block(k);
        let mut start = 0;
        loop {
            let end = (start + block).min(k);
            let finish = finish.at(end == k);
            let values = &panels.values[start * L::COLUMNS..];
            let run = PanelRun { values, stride: panels.k * L::COLUMNS, at: 0, width: n };
            // SAFETY: `target` is a `&mut` slice of `Panels::multiply`, which checked rows and columns.
            unsafe { multiply_rows(l, rows, start..end, run, target, finish) };
            start = end;
            if start == k {
                break;
            }
        }
    }
}

/// Outputs a parallel task of [`single_row`] computes.
const OUTPUTS: usize = 512;

fn single_row(isa: Isa, x: &[f32], right: &Matrix<'_>, bias: Option<&[f32]>, half: bool, out: &mut [f32]) {
    out.par_chunks_mut(OUTPUTS).enumerate().for_each(|(i, out)| {
        isa.run(DotKernel { x, right: *right, first: i * OUTPUTS, bias, half, out });
    });
}

struct DotKernel<'a> {
    x: &'a [f32],
    right: Matrix<'a>,
    first: usize,
    bias: Option<&'a [f32]>,
    half: bool,
    out: &'a mut [f32],
}

impl Kernel for DotKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let DotKernel { x, right, first, bias, half, out } = self;
        let (xs, x_tail) = x.as_chunks::<LANES>();
        let (quads, singles) = xs.as_chunks::<4>();
        for (j, y) in out.iter_mut().enumerate() {
            let start = (first + j) * right.n_stride;
            let mut acc = [l.splat(0.0); 4];
            for (i, quad) in quads.iter().enumerate() {
                for (c, x) in quad.iter().enumerate() {
                    let at = start + (4 * i + c) * LANES;
                    acc[c] = l.fma(l.load(x), right.lanes(l, at), acc[c]);
                }
            }
            for (c, x) in singles.iter().enumerate() {
                let at = start + (4 * quads.len() + c) * LANES;
                acc[c] = l.fma(l.load(x), right.lanes(l, at), acc[c]);
            }
            if !x_tail.is_empty() {
                let whole = xs.len() * LANES;
                let mut rest = [0.0; LANES];
                for (i, r) in rest.iter_mut().enumerate().take(x_tail.len()) {
                    *r = right.get(whole + i, first + j);
                }
                acc[3] = l.fma(l.load_part(x_tail, 0.0), l.load(&rest), acc[3]);
            }
            let mut sum = l.sum(l.add(l.add(acc[0], acc[1]), l.add(acc[2], acc[3])));
            if let Some(b) = bias {
                sum += b[first + j];
            }
            *y = if half { f16::from_f32(sum).to_f32() } else { sum };
        }
    }
}
