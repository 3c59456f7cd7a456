//! An engine for tests that behaves as Core ML is known to.
//!
//! It computes nothing: every element says where it is, so a hand-off that mixes up heads, rows or lanes is
//! caught by its values. What it takes from Core ML are the habits that break callers: it writes into the same
//! buffers at every prediction, pads rows, ignores the buffers it was offered, and fails.

use kvbaton_layout::{CacheSpec, DType, Layout, LiveRows, ModelSpec, Part, TensorInfo, presets};
use kvbaton_memory::{Buffer, Bytes, Leased};

use crate::prefill::choose_function;
use crate::{CacheView, Error, ErrorKind, FunctionInfo, Logits, Prefill, PrefillReport, Prefilled, Tensor};

/// How the engine misbehaves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Habits {
    /// Every row starts on a multiple of so many bytes; 0 packs them.
    pub row_align_bytes: usize,
    /// Fresh buffers at every prediction, whatever the last one used. Core ML does so when it refuses an output
    /// backing; otherwise the buffers of the last prediction are written again.
    pub ignores_backings: bool,
    /// Fails at these predictions, counted from 0.
    pub fails_at: Vec<usize>,
}

/// The engine.
pub struct FakePrefill {
    cache: CacheSpec,
    layout: Layout,
    functions: Vec<FunctionInfo>,
    habits: Habits,
    buffers: Vec<Leased>,
    predictions: usize,
}

/// What the engine stores for an element: distinct for neighbours in every direction, exact in float16.
pub fn element(part: Part, layer: usize, head: usize, row: usize, lane: usize, token: u32) -> f32 {
    let mix = layer
        .wrapping_mul(31)
        .wrapping_add(head.wrapping_mul(17))
        .wrapping_add(row.wrapping_mul(7))
        .wrapping_add(lane.wrapping_mul(3))
        .wrapping_add(token as usize);
    let value = (mix % 2039) as f32;
    if part == Part::Key { value } else { -value - 1.0 }
}

impl FakePrefill {
    /// An engine whose cache is stacked as `kvbaton export` stacks it, with one function a length.
    ///
    /// # Errors
    ///
    /// When the layers are not all of one shape.
    pub fn new(cache: CacheSpec, lengths: &[usize], habits: Habits) -> Result<FakePrefill, Error> {
        let uniform = cache.layers.iter().all(|l| l.attention().is_some() && *l == cache.layers[0]);
        if !uniform || cache.layers.is_empty() {
            return Err(Error::new(ErrorKind::Usage, "the fake engine stacks layers of one shape"));
        }
        let layout = presets::get("kvbaton-stacked")?;
        let mut functions: Vec<FunctionInfo> = lengths
            .iter()
            .map(|&tokens| FunctionInfo { name: format!("prefill_{tokens}"), tokens })
            .collect();
        functions.sort_by_key(|f| f.tokens);
        Ok(FakePrefill { cache, layout, functions, habits, buffers: Vec::new(), predictions: 0 })
    }
}

impl Prefill for FakePrefill {
    fn engine(&self) -> &'static str {
        "fake"
    }

    fn functions(&self) -> &[FunctionInfo] {
        &self.functions
    }

    fn model(&self) -> Option<&ModelSpec> {
        None
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn prepare(&mut self, tokens: usize) -> Result<(), Error> {
        choose_function(&self.functions, tokens).map(|_| ())
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        let start = std::time::Instant::now();
        let function = choose_function(&self.functions, tokens.len())?.clone();
        let prediction = self.predictions;
        self.predictions += 1;
        if self.habits.fails_at.contains(&prediction) {
            return Err(Error::new(
                ErrorKind::Program,
                format!("prediction {prediction} failed, as it was told to"),
            ));
        }
        let (heads, key_dim, value_dim) =
            self.cache.layers[0].attention().expect("attention layers, checked in `new`");
        let infos = [("key_cache", key_dim), ("value_cache", value_dim)].map(|(name, dim)| {
            padded(name, &[self.cache.layers.len(), heads, function.tokens, dim], self.habits.row_align_bytes)
        });
        let reusable = self.buffers.len() == infos.len()
            && self.buffers.iter().zip(&infos).all(|(b, i)| b.read().is_ok_and(|b| b.len() == i.len_bytes));
        if self.habits.ignores_backings || !reusable {
            self.buffers = infos.iter().map(|i| Leased::new(Buffer::zeroed(i.len_bytes))).collect();
        }
        for (part, (info, buffer)) in
            [Part::Key, Part::Value].into_iter().zip(infos.iter().zip(&self.buffers))
        {
            fill(&mut buffer.write()?, info, part, tokens);
        }
        let mut tensors = Vec::new();
        for (info, buffer) in infos.iter().zip(&self.buffers) {
            tensors.push(Tensor { info: info.clone(), bytes: Bytes::new(buffer.read()?) });
        }
        let cache =
            CacheView::new(self.layout.clone(), self.cache.clone(), tensors, LiveRows::seen(tokens.len()))?
                .with_tokens(tokens.to_vec());
        let seconds = start.elapsed().as_secs_f64();
        let report = PrefillReport {
            engine: self.engine().to_owned(),
            function: function.name,
            tokens: tokens.len(),
            seconds,
            tokens_per_second: tokens.len() as f64 / seconds,
        };
        Ok(Prefilled { cache, logits: Some(Logits { values: vec![0.0] }), report })
    }
}

/// A float16 tensor whose rows start on multiples of `row_align_bytes`.
fn padded(name: &str, shape: &[usize], row_align_bytes: usize) -> TensorInfo {
    let row = shape[3] * DType::Float16.size_bytes();
    let row = row.next_multiple_of(row_align_bytes.max(1));
    let strides_bytes = vec![shape[1] * shape[2] * row, shape[2] * row, row, DType::Float16.size_bytes()];
    let len_bytes = shape[0] * strides_bytes[0];
    TensorInfo {
        name: name.to_owned(),
        dtype: DType::Float16,
        shape: shape.to_vec(),
        strides_bytes,
        len_bytes,
    }
}

/// Writes every live element; padding and rows of no token are NaN.
fn fill(bytes: &mut [u8], info: &TensorInfo, part: Part, tokens: &[u32]) {
    for slot in bytes.chunks_exact_mut(2) {
        slot.copy_from_slice(&half::f16::NAN.to_le_bytes());
    }
    let (shape, strides) = (&info.shape, &info.strides_bytes);
    for layer in 0..shape[0] {
        for head in 0..shape[1] {
            for (row, &token) in tokens.iter().enumerate() {
                for lane in 0..shape[3] {
                    let at = layer * strides[0] + head * strides[1] + row * strides[2] + lane * strides[3];
                    let value = half::f16::from_f32(element(part, layer, head, row, lane, token));
                    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(habits: Habits) -> FakePrefill {
        FakePrefill::new(CacheSpec::full(2, 2, 4), &[8], habits).unwrap()
    }

    #[test]
    fn a_second_prediction_is_refused_while_the_first_cache_is_held() {
        let mut engine = engine(Habits::default());
        let first = engine.prefill(&[1, 2, 3]).unwrap();
        assert_eq!(engine.prefill(&[4]).unwrap_err().kind(), ErrorKind::Lease);
        drop(first);
        assert!(engine.prefill(&[4]).is_ok());
    }

    #[test]
    fn an_engine_that_ignores_backings_never_touches_a_held_cache() {
        let mut engine = engine(Habits { ignores_backings: true, ..Habits::default() });
        let first = engine.prefill(&[1, 2, 3]).unwrap();
        let before = first.cache.bytes()[0].to_vec();
        engine.prefill(&[9, 9, 9]).unwrap();
        assert_eq!(first.cache.bytes()[0], before);
    }

    #[test]
    fn a_failed_prediction_leaves_the_engine_usable() {
        let mut engine = engine(Habits { fails_at: vec![0], ..Habits::default() });
        assert_eq!(engine.prefill(&[1]).unwrap_err().kind(), ErrorKind::Program);
        assert!(engine.prefill(&[1]).is_ok());
    }
}
