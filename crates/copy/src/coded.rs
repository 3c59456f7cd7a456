//! Rows that are decoded, encoded, or both.
//!
//! In general a few rows of all heads at a time are gathered into packed scratch, decoded to float32, encoded and
//! scattered, so that kernels see packed slices whatever the strides of both sides are; see [`Way`] for what is shorter.

use kvbaton_kernels::{
    Affine, BoxMove, Elem, Int8Rows, OnOverflow, ScalePer, Tally, Writing, affine_dequantize,
    affine_quantize, int8_decode, int8_encode, move_box, scan_box,
};
use kvbaton_layout::{Encoding, Role};
use kvbaton_plan::{Coded, CodedOp, Place};

use crate::CopyError;
use crate::run::{TargetBase, elem};

/// Values that are decoded at once: the scratch stays in a near cache.
const SCRATCH: usize = 16 << 10;

/// A coded operation, checked.
pub(crate) struct Coder<'a> {
    op: &'a CodedOp,
    sources: Vec<Scheme>,
    target: Scheme,
    way: Way<'a>,
}

/// How rows get to the target.
#[derive(Clone, Copy)]
enum Way<'a> {
    /// Decoded to float32, then encoded.
    Through,
    /// Values quantised from the type that they have, on which MLX's codes depend.
    Quantize { values: &'a Place, grouped: Grouped },
    /// Codes whose lanes become neighbouring floats, from where they are to where they go.
    Scale { codes: &'a Coded, scale: Place },
}

/// What an encoding is to the kernels.
#[derive(Clone, Copy, Debug)]
enum Scheme {
    Plain,
    Int8 { scale: Place, per: ScalePer },
    Affine(Grouped),
}

/// MLX's affine codes, whose scales and biases are of one type.
#[derive(Clone, Copy, Debug)]
struct Grouped {
    affine: Affine,
    scale: Place,
    bias: Place,
}

impl Scheme {
    fn new(side: &Coded) -> Result<Scheme, CopyError> {
        let fail = |problem: String| CopyError::Encoding { encoding: side.encoding, problem };
        let companion = |place: Option<Place>, role: Role| {
            let place = place.ok_or_else(|| fail(format!("there are no {}", role.name())))?;
            if !elem(place.dtype).is_float() {
                return Err(fail(format!("their {} are {}", role.name(), place.dtype)));
            }
            Ok(place)
        };
        let scheme = match side.encoding {
            Encoding::Plain => {
                if !elem(side.elements.dtype).is_float() {
                    return Err(fail(format!("they are {}", side.elements.dtype)));
                }
                return Ok(Scheme::Plain);
            }
            Encoding::Int8PerTokenHead => {
                Scheme::Int8 { scale: companion(side.scale, Role::Scale)?, per: ScalePer::HeadRow }
            }
            Encoding::Int8PerToken => {
                Scheme::Int8 { scale: companion(side.scale, Role::Scale)?, per: ScalePer::Row }
            }
            Encoding::Affine { bits, group_size } => {
                let affine =
                    Affine::new(u32::from(bits), group_size).map_err(|error| fail(error.to_string()))?;
                let (scale, bias) = (companion(side.scale, Role::Scale)?, companion(side.bias, Role::Bias)?);
                if scale.dtype != bias.dtype {
                    return Err(fail(format!("scales are {}, biases {}", scale.dtype, bias.dtype)));
                }
                Scheme::Affine(Grouped { affine, scale, bias })
            }
        };
        if side.encoding.dtype() != Some(side.elements.dtype) {
            return Err(fail(format!("their codes are {}", side.elements.dtype)));
        }
        Ok(scheme)
    }
}

/// Packed memory that rows pass through.
#[derive(Default)]
struct Scratch {
    wide: Vec<f32>,
    values: Vec<u8>,
    codes: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
}

/// The first `len` bytes of `buffer`, which grows to hold them.
fn first(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// Heads and rows that are coded at once, of `lanes` lanes each.
#[derive(Clone, Copy)]
struct Span {
    heads: usize,
    row: usize,
    rows: usize,
    lanes: usize,
}

impl Span {
    fn values(self) -> usize {
        self.heads * self.rows * self.lanes
    }
}

impl<'a> Coder<'a> {
    /// # Errors
    ///
    /// When a side's encoding lacks something, or is none that the kernels know.
    pub(crate) fn new(op: &'a CodedOp) -> Result<Coder<'a>, CopyError> {
        let sources: Vec<Scheme> =
            op.sources.iter().map(|s| Scheme::new(&s.coded)).collect::<Result<_, _>>()?;
        let target = Scheme::new(&op.dst)?;
        let way = match (op.sources.as_slice(), sources.as_slice(), target) {
            ([source], [Scheme::Plain], Scheme::Affine(grouped))
                if source.heads == op.heads && source.coded.elements.dtype == grouped.scale.dtype =>
            {
                Way::Quantize { values: &source.coded.elements, grouped }
            }
            ([source], [Scheme::Int8 { scale, .. }], Scheme::Plain)
                if source.heads == op.heads && lanes_touch(&source.coded) && lanes_touch(&op.dst) =>
            {
                Way::Scale { codes: &source.coded, scale: *scale }
            }
            _ => Way::Through,
        };
        Ok(Coder { op, sources, target, way })
    }

    /// Codes `count` rows from `start` on. Places in `tally` count rows from `start`.
    ///
    /// # Safety
    ///
    /// Every box of the operation lies within its buffer, `targets` are the starts of exclusive buffers that do not
    /// overlap the sources, and nothing else touches these rows of the target meanwhile.
    pub(crate) unsafe fn code(
        &self,
        start: usize,
        count: usize,
        sources: &[&[u8]],
        targets: &[TargetBase],
        writing: Writing,
        tally: &mut Tally,
    ) {
        let (heads, lanes) = (self.op.heads.len(), self.op.lanes);
        // What passes through no scratch need not be cut.
        let scratch_rows = (SCRATCH / (heads * lanes).max(1)).max(1);
        let at_once = if matches!(self.way, Way::Scale { .. }) { count } else { scratch_rows.min(count) };
        let mut scratch = Scratch::default();
        for down in (0..count).step_by(at_once.max(1)) {
            let span = Span { heads, row: start + down, rows: at_once.min(count - down), lanes };
            let mut found = Tally::default();
            // SAFETY: the caller's promise.
            unsafe {
                match self.way {
                    Way::Quantize { values, grouped } => requantize(
                        values,
                        &self.op.dst,
                        grouped,
                        span,
                        sources,
                        targets,
                        &mut scratch,
                        &mut found,
                    ),
                    Way::Scale { codes, scale } => {
                        scale_rows(codes, &scale, &self.op.dst, span, sources, targets, writing, &mut found);
                    }
                    Way::Through => self.through(span, sources, targets, writing, &mut scratch, &mut found),
                }
            }
            if !found.is_clean() {
                tally.merge(&found.offset_by([0, down, 0]));
            }
        }
    }

    /// Decodes the rows of `span` from every source, and encodes them.
    ///
    /// # Safety
    ///
    /// As for [`Coder::code`].
    unsafe fn through(
        &self,
        span: Span,
        sources: &[&[u8]],
        targets: &[TargetBase],
        writing: Writing,
        scratch: &mut Scratch,
        tally: &mut Tally,
    ) {
        let mut wide = std::mem::take(&mut scratch.wide);
        wide.resize(span.values(), 0.0);
        for (source, scheme) in self.op.sources.iter().zip(&self.sources) {
            let part = Span { heads: source.heads.len(), ..span };
            let first = (source.heads.start - self.op.heads.start) * span.rows * span.lanes;
            let wide = &mut wide[first..first + part.values()];
            // SAFETY: the caller's promise.
            unsafe { decode(&source.coded, *scheme, part, sources, wide, scratch) };
        }
        // SAFETY: the caller's promise.
        unsafe { encode(&self.op.dst, self.target, span, &wide, targets, writing, scratch, tally) };
        scratch.wide = wide;
    }
}

/// Whether the elements of a row lie side by side.
fn lanes_touch(side: &Coded) -> bool {
    side.elements.strides_bytes[2] == elem(side.elements.dtype).bytes()
}

/// Strides of a packed box.
fn packed(extents: [usize; 3], elem: Elem) -> [isize; 3] {
    let lane = elem.bytes();
    [extents[1] * extents[2] * lane, extents[2] * lane, lane].map(usize::cast_signed)
}

/// The first byte of the rows of `span` in a place.
fn start(place: &Place, span: Span) -> usize {
    place.offset_bytes + span.row * place.strides_bytes[1]
}

/// Copies `lanes` stored elements a row from a place into packed memory.
///
/// # Safety
///
/// The box lies within `sources`.
unsafe fn gather(place: &Place, span: Span, lanes: usize, sources: &[&[u8]], to: &mut [u8]) {
    let (extents, elem) = ([span.heads, span.rows, lanes], elem(place.dtype));
    assert_eq!(to.len(), span.heads * span.rows * lanes * elem.bytes(), "scratch of the box");
    let mv = BoxMove {
        extents,
        src_strides: place.strides_bytes.map(usize::cast_signed),
        dst_strides: packed(extents, elem),
        src: elem,
        dst: elem,
    };
    let from = sources[place.tensor][start(place, span)..].as_ptr();
    // SAFETY: the caller's promise for the source; `to` is packed and as long as the box.
    unsafe { move_box(&mv, from, to.as_mut_ptr(), OnOverflow::Count.into(), &mut Tally::default()) };
}

/// Copies packed memory into a place.
///
/// # Safety
///
/// The box lies within its target, and nothing else touches it meanwhile.
unsafe fn scatter(place: &Place, span: Span, lanes: usize, from: &[u8], targets: &[TargetBase]) {
    let (extents, elem) = ([span.heads, span.rows, lanes], elem(place.dtype));
    assert_eq!(from.len(), span.heads * span.rows * lanes * elem.bytes(), "scratch of the box");
    let mv = BoxMove {
        extents,
        src_strides: packed(extents, elem),
        dst_strides: place.strides_bytes.map(usize::cast_signed),
        src: elem,
        dst: elem,
    };
    // SAFETY: the caller's promise for the target; `from` is packed and as long as the box.
    unsafe {
        let to = targets[place.tensor].0.add(start(place, span));
        move_box(&mv, from.as_ptr(), to, OnOverflow::Count.into(), &mut Tally::default());
    }
}

/// Converts packed values between float types.
fn convert(from: (Elem, &[u8]), to: (Elem, &mut [u8]), span: Span, writing: Writing, tally: &mut Tally) {
    let extents = [span.heads, span.rows, span.lanes];
    let lens = (from.1.len() / from.0.bytes(), to.1.len() / to.0.bytes());
    assert_eq!(lens, (span.values(), span.values()), "as many values on both sides");
    let mv = BoxMove {
        extents,
        src_strides: packed(extents, from.0),
        dst_strides: packed(extents, to.0),
        src: from.0,
        dst: to.0,
    };
    // SAFETY: both slices are packed and hold the box.
    unsafe { move_box(&mv, from.1.as_ptr(), to.1.as_mut_ptr(), writing, tally) };
}

fn as_bytes(wide: &[f32]) -> &[u8] {
    // SAFETY: four bytes of every f32 are initialised, and a byte has no alignment.
    unsafe { std::slice::from_raw_parts(wide.as_ptr().cast(), size_of_val(wide)) }
}

fn as_bytes_mut(wide: &mut [f32]) -> &mut [u8] {
    // SAFETY: as in `as_bytes`; every bit pattern is an f32.
    unsafe { std::slice::from_raw_parts_mut(wide.as_mut_ptr().cast(), size_of_val(wide)) }
}

/// Multiplies codes by their scales, from where they are to where they go. A shared scale has a stride of 0 along heads.
///
/// # Safety
///
/// As for [`decode`] and [`encode`]; lanes are packed on both sides.
#[expect(clippy::too_many_arguments, reason = "from where, where to, what, and what to do with misfits")]
unsafe fn scale_rows(
    from: &Coded,
    scale: &Place,
    to: &Coded,
    span: Span,
    sources: &[&[u8]],
    targets: &[TargetBase],
    writing: Writing,
    tally: &mut Tally,
) {
    let outer = |place: &Place| [place.strides_bytes[0], place.strides_bytes[1]].map(usize::cast_signed);
    let int8 = Int8Rows {
        extents: [span.heads, span.rows, span.lanes],
        code_strides: outer(&from.elements),
        scale_strides: outer(scale),
        value_strides: outer(&to.elements),
        per: ScalePer::HeadRow,
        scale: elem(scale.dtype),
        value: elem(to.elements.dtype),
    };
    let codes = sources[from.elements.tensor][start(&from.elements, span)..].as_ptr();
    let scales = sources[scale.tensor][start(scale, span)..].as_ptr();
    // SAFETY: the caller's promise.
    unsafe {
        let values = targets[to.elements.tensor].0.add(start(&to.elements, span));
        int8_decode(&int8, codes.cast(), scales, values, writing, tally);
    }
}

/// Decodes rows into `wide`, packed by head, row and lane.
///
/// # Safety
///
/// The boxes of `side` lie within `sources`.
unsafe fn decode(
    side: &Coded,
    scheme: Scheme,
    span: Span,
    sources: &[&[u8]],
    wide: &mut [f32],
    scratch: &mut Scratch,
) {
    let rows = span.heads * span.rows;
    let stored = |role| side.encoding.stored_elements(role, span.lanes);
    match scheme {
        Scheme::Plain => {
            let extents = [span.heads, span.rows, span.lanes];
            let mv = BoxMove {
                extents,
                src_strides: side.elements.strides_bytes.map(usize::cast_signed),
                dst_strides: packed(extents, Elem::F32),
                src: elem(side.elements.dtype),
                dst: Elem::F32,
            };
            let from = sources[side.elements.tensor][start(&side.elements, span)..].as_ptr();
            let to = as_bytes_mut(wide).as_mut_ptr();
            // SAFETY: the caller's promise; `wide` is packed and holds the box.
            unsafe { move_box(&mv, from, to, OnOverflow::Count.into(), &mut Tally::default()) };
        }
        Scheme::Int8 { scale, .. } => {
            let codes = first(&mut scratch.codes, span.values());
            let lanes = span.lanes.cast_signed();
            // A shared scale has a stride of 0 along heads.
            let int8 = Int8Rows {
                extents: [span.heads, span.rows, span.lanes],
                code_strides: [lanes * span.rows.cast_signed(), lanes],
                scale_strides: [scale.strides_bytes[0], scale.strides_bytes[1]].map(usize::cast_signed),
                value_strides: [4 * lanes * span.rows.cast_signed(), 4 * lanes],
                per: ScalePer::HeadRow,
                scale: elem(scale.dtype),
                value: Elem::F32,
            };
            let mut unread = Tally::default();
            // SAFETY: the caller's promise; `codes` and `wide` are packed and hold the box.
            unsafe {
                gather(&side.elements, span, span.lanes, sources, codes);
                let scales = sources[scale.tensor][start(&scale, span)..].as_ptr();
                let to = as_bytes_mut(wide).as_mut_ptr();
                int8_decode(&int8, codes.as_ptr().cast(), scales, to, OnOverflow::Count.into(), &mut unread);
            }
        }
        Scheme::Affine(Grouped { affine, scale, bias }) => {
            let kind = elem(scale.dtype);
            let (words, groups) = (stored(Role::Elements), stored(Role::Scale));
            let codes = first(&mut scratch.codes, rows * words * 4);
            let scales = first(&mut scratch.scales, rows * groups * kind.bytes());
            let biases = first(&mut scratch.biases, rows * groups * kind.bytes());
            // SAFETY: the caller's promise.
            unsafe {
                gather(&side.elements, span, words, sources, codes);
                gather(&scale, span, groups, sources, scales);
                gather(&bias, span, groups, sources, biases);
            }
            let values = first(&mut scratch.values, span.values() * kind.bytes());
            affine_dequantize(affine, kind, codes, scales, biases, values);
            let wide = (Elem::F32, as_bytes_mut(wide));
            convert((kind, values), wide, span, OnOverflow::Count.into(), &mut Tally::default());
        }
    }
}

/// Encodes the rows of `wide` into the target. `tally` counts values that are not finite, or too large for the
/// target's type.
///
/// # Safety
///
/// The boxes of `side` lie within `targets`, and nothing else touches these rows of them meanwhile.
#[expect(clippy::too_many_arguments, reason = "where to, what, and two things to be filled")]
unsafe fn encode(
    side: &Coded,
    scheme: Scheme,
    span: Span,
    wide: &[f32],
    targets: &[TargetBase],
    writing: Writing,
    scratch: &mut Scratch,
    tally: &mut Tally,
) {
    let extents = [span.heads, span.rows, span.lanes];
    match scheme {
        Scheme::Plain => {
            let mv = BoxMove {
                extents,
                src_strides: packed(extents, Elem::F32),
                dst_strides: side.elements.strides_bytes.map(usize::cast_signed),
                src: Elem::F32,
                dst: elem(side.elements.dtype),
            };
            // SAFETY: the caller's promise; `wide` is packed and holds the box.
            unsafe {
                let to = targets[side.elements.tensor].0.add(start(&side.elements, span));
                move_box(&mv, as_bytes(wide).as_ptr(), to, writing, tally);
            }
        }
        Scheme::Int8 { scale, per } => {
            let codes = first(&mut scratch.codes, span.values());
            let lanes = span.lanes.cast_signed();
            let int8 = Int8Rows {
                extents,
                code_strides: [lanes * span.rows.cast_signed(), lanes],
                scale_strides: [scale.strides_bytes[0], scale.strides_bytes[1]].map(usize::cast_signed),
                value_strides: [4 * lanes * span.rows.cast_signed(), 4 * lanes],
                per,
                scale: elem(scale.dtype),
                value: Elem::F32,
            };
            // SAFETY: `wide` and `codes` are packed and hold the box; the caller's promise covers scales and codes.
            unsafe {
                let scales = targets[scale.tensor].0.add(start(&scale, span));
                let from = as_bytes(wide).as_ptr();
                int8_encode(&int8, from, codes.as_mut_ptr().cast(), scales, tally);
                scatter(&side.elements, span, span.lanes, codes, targets);
            }
        }
        Scheme::Affine(grouped) => {
            let kind = elem(grouped.scale.dtype);
            let mut values = std::mem::take(&mut scratch.values);
            let packed_values = if kind == Elem::F32 {
                let strides = packed(extents, kind);
                // SAFETY: `wide` is packed and holds the box.
                unsafe { scan_box(kind, kind, extents, strides, as_bytes(wide).as_ptr(), tally) };
                as_bytes(wide)
            } else {
                let values = first(&mut values, span.values() * kind.bytes());
                convert((Elem::F32, as_bytes(wide)), (kind, values), span, writing, tally);
                values
            };
            // SAFETY: the caller's promise.
            unsafe { group(side, grouped, span, packed_values, targets, scratch) };
            scratch.values = values;
        }
    }
}

/// Quantises rows from where they are into the target, whose scales have their type. `tally` counts values that are not
/// finite.
///
/// # Safety
///
/// As for [`decode`] and [`encode`].
#[expect(clippy::too_many_arguments, reason = "from where, where to, what, and two things to be filled")]
unsafe fn requantize(
    place: &Place,
    side: &Coded,
    grouped: Grouped,
    span: Span,
    sources: &[&[u8]],
    targets: &[TargetBase],
    scratch: &mut Scratch,
    tally: &mut Tally,
) {
    let kind = elem(place.dtype);
    let extents = [span.heads, span.rows, span.lanes];
    let mut values = std::mem::take(&mut scratch.values);
    let packed_values = first(&mut values, span.values() * kind.bytes());
    // SAFETY: the caller's promise; the values are packed and hold the box.
    unsafe {
        gather(place, span, span.lanes, sources, packed_values);
        scan_box(kind, kind, extents, packed(extents, kind), packed_values.as_ptr(), tally);
        group(side, grouped, span, packed_values, targets, scratch);
    }
    scratch.values = values;
}

/// Quantises packed `values`, which have the type of the scales, into the target.
///
/// # Safety
///
/// As for [`encode`].
unsafe fn group(
    side: &Coded,
    Grouped { affine, scale, bias }: Grouped,
    span: Span,
    values: &[u8],
    targets: &[TargetBase],
    scratch: &mut Scratch,
) {
    let (rows, kind) = (span.heads * span.rows, elem(scale.dtype));
    let stored = |role| side.encoding.stored_elements(role, span.lanes);
    let (words, groups) = (stored(Role::Elements), stored(Role::Scale));
    let codes = first(&mut scratch.codes, rows * words * 4);
    let scales = first(&mut scratch.scales, rows * groups * kind.bytes());
    let biases = first(&mut scratch.biases, rows * groups * kind.bytes());
    affine_quantize(affine, kind, values, codes, scales, biases);
    // SAFETY: the caller's promise.
    unsafe {
        scatter(&side.elements, span, words, codes, targets);
        scatter(&scale, span, groups, scales, targets);
        scatter(&bias, span, groups, biases, targets);
    }
}
