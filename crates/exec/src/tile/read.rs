//! Operands of row programs, read a row or a block of rows at a time.

use kvbaton_kernels::rows::{self, Source};

use crate::tensor::{Context, RowOffsets, Tensor};

/// An external operand, ready to be read by rows.
pub(crate) struct Reader<'a> {
    source: Source<'a>,
    rows: RowOffsets,
    /// Values in a row.
    len: usize,
    /// Whether one stored value serves the whole row.
    single: bool,
    /// Elements from a value of a row to the next.
    stride: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(tensor: &'a Tensor, lead: &[usize], len: usize) -> Result<Reader<'a>, String> {
        let mut shape = lead.to_vec();
        shape.push(len);
        let view = tensor.broadcast(&shape)?;
        let stride = view.strides.last().copied().unwrap_or(1);
        let single = len == 1 || stride == 0;
        let rows = RowOffsets::new(lead, &view.strides[..lead.len()], view.offset);
        Ok(Reader { source: tensor.source()?, rows, len, single, stride })
    }

    /// Whether a row's values lie side by side.
    pub(crate) fn is_adjacent(&self) -> bool {
        self.single || self.stride == 1
    }

    /// Rows `first..first + rows` of `len` values as one source, if they are stored so.
    pub(super) fn block(&self, first: usize, rows: usize, len: usize) -> Option<Source<'a>> {
        if self.single && (self.rows.stride() == Some(0) || rows == 1) {
            return Some(self.value(first));
        }
        if self.single && len > 1 {
            return None;
        }
        let at = self.rows.get(first);
        let packed = match self.rows.stride() {
            Some(stride) => stride == len,
            None => {
                rows > 0 && self.rows.get(first + rows - 1) == at + (rows - 1) * len && {
                    (1..rows).all(|r| self.rows.get(first + r) == at + r * len)
                }
            }
        };
        (packed || rows == 1).then(|| self.slice(at, rows * len))
    }

    /// Row `row`: `len` values, or one for all.
    pub(crate) fn row(&self, row: usize, len: usize) -> Source<'a> {
        if self.single { self.value(row) } else { self.slice(self.rows.get(row), len) }
    }

    fn value(&self, row: usize) -> Source<'a> {
        let at = self.rows.get(row);
        match self.source {
            Source::Singles(v) => Source::Scalar(v[at]),
            Source::Halves(v) => Source::Scalar(v[at].to_f32()),
            other => other,
        }
    }

    fn slice(&self, at: usize, len: usize) -> Source<'a> {
        match self.source {
            Source::Singles(v) => Source::Singles(&v[at..at + len]),
            Source::Halves(v) => Source::Halves(&v[at..at + len]),
            other => other,
        }
    }
}

/// Values of a block of rows in one register.
#[derive(Debug, Default)]
pub(crate) enum Values<'a> {
    #[default]
    None,
    Own(Vec<f32>),
    Borrowed(&'a mut [f32]),
}

impl Values<'_> {
    pub(crate) fn slice(&self, len: usize) -> &[f32] {
        match self {
            Values::None => &[],
            Values::Own(v) => &v[..len],
            Values::Borrowed(v) => &v[..len],
        }
    }

    pub(super) fn slice_mut(&mut self, len: usize) -> &mut [f32] {
        if matches!(self, Values::None) {
            *self = Values::Own(Vec::new());
        }
        match self {
            Values::None => &mut [],
            Values::Own(v) => {
                if v.len() < len {
                    v.resize(len, 0.0);
                }
                &mut v[..len]
            }
            Values::Borrowed(v) => &mut v[..len],
        }
    }
}

/// An operand of a step over a block of rows.
pub(super) enum Input<'a> {
    /// The register that takes the result.
    Result,
    Rows {
        values: &'a [f32],
        len: usize,
    },
    External(&'a Reader<'a>),
}

impl<'a> Input<'a> {
    /// The whole block as one source for a result of `len` values a row, if it is one.
    pub(super) fn block(&self, first: usize, rows: usize, len: usize) -> Option<Source<'a>> {
        match self {
            Input::Result => Some(Source::Destination),
            Input::Rows { values, len: have } => (*have == len).then_some(Source::Singles(values)),
            Input::External(reader) => reader.block(first, rows, len),
        }
    }

    /// Row `row` of the block, for a result of `len` values.
    pub(super) fn row(&self, first: usize, row: usize, len: usize) -> Source<'a> {
        match self {
            Input::Result => Source::Destination,
            Input::Rows { values, len: 1 } if len != 1 => Source::Scalar(values[row]),
            Input::Rows { values, len: have } => Source::Singles(&values[row * have..][..*have]),
            Input::External(reader) => reader.row(first + row, len),
        }
    }

    /// Values in a row.
    pub(super) fn len(&self, result: usize) -> usize {
        match self {
            Input::Result => result,
            Input::Rows { len, .. } => *len,
            Input::External(reader) => reader.len,
        }
    }

    /// Values `at..at + out.len()` of a row.
    pub(super) fn copy(&self, cx: &Context, first: usize, row: usize, at: usize, out: &mut [f32]) {
        match self.row(first, row, at + out.len()) {
            Source::Singles(v) => out.copy_from_slice(&v[at..at + out.len()]),
            Source::Halves(v) => rows::widen(cx.isa, &v[at..at + out.len()], out),
            Source::Scalar(x) => out.fill(x),
            Source::Destination => {}
        }
    }
}
