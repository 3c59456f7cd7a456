//! A cache somewhere in memory.

use std::ops::Range;

use kvbaton_copy::{CopyOptions, Threads, run};
use kvbaton_layout::{Block, CacheSpec, DType, Layout, LiveRows, ModelSpec, Part, Resolved, TensorInfo};
use kvbaton_memory::Bytes;
use kvbaton_plan::plan;

use crate::cut::{self, Cut};
use crate::{Error, ErrorKind};

/// A named tensor and its memory.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name, type, shape and strides.
    pub info: TensorInfo,
    /// Its bytes, from the first element on.
    pub bytes: Bytes,
}

/// Memory, a layout and the live rows: a cache as its producer left it. Nothing was copied to make it.
#[derive(Clone, Debug)]
pub struct CacheView {
    layout: Layout,
    cache: CacheSpec,
    model: Option<ModelSpec>,
    tensors: Vec<Tensor>,
    live: LiveRows,
    tokens: Option<Vec<u32>>,
    cut: Option<Cut>,
}

impl CacheView {
    /// A view of `tensors`. Tensors that the layout does not name are dropped.
    ///
    /// # Errors
    ///
    /// When the tensors do not fit the layout, the model or the live rows.
    pub fn new(
        layout: Layout,
        cache: CacheSpec,
        tensors: Vec<Tensor>,
        live: LiveRows,
    ) -> Result<CacheView, Error> {
        let names = layout.tensor_names(&cache)?;
        let mut view = CacheView { layout, cache, model: None, tensors, live, tokens: None, cut: None };
        // With all of them: an error lists the tensors that there are.
        view.resolve()?;
        view.tensors.retain(|t| names.contains(&t.info.name));
        Ok(view)
    }

    /// Adds what is known of the model.
    #[must_use]
    pub fn with_model(mut self, model: Option<ModelSpec>) -> CacheView {
        self.model = model;
        self
    }

    /// Adds the ids of the tokens that the rows belong to.
    #[must_use]
    pub fn with_tokens(mut self, tokens: Vec<u32>) -> CacheView {
        self.tokens = Some(tokens);
        self
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What each layer keeps.
    pub fn cache(&self) -> &CacheSpec {
        &self.cache
    }

    /// What is known of the model.
    pub fn model(&self) -> Option<&ModelSpec> {
        self.model.as_ref()
    }

    /// The tensors.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The rows that the producer left live. After a trim, fewer are: see [`CacheView::tokens_seen`].
    pub fn live(&self) -> &LiveRows {
        &self.live
    }

    /// Tokens that the cache has seen: the position of the next one.
    pub fn tokens_seen(&self) -> usize {
        self.cut.as_ref().map_or(self.live.tokens_seen, Cut::tokens_seen)
    }

    /// Ids of the tokens that the rows belong to, oldest first, where they are known.
    pub fn tokens(&self) -> Option<&[u32]> {
        self.tokens.as_deref()
    }

    /// The view as blocks of memory.
    ///
    /// # Errors
    ///
    /// As [`Layout::resolve`].
    pub fn resolve(&self) -> Result<Resolved, Error> {
        let infos: Vec<TensorInfo> = self.tensors.iter().map(|t| t.info.clone()).collect();
        match &self.cut {
            None => Ok(self.layout.resolve(&self.cache, &infos, &self.live)?),
            Some(cut) => {
                let all = self.layout.resolve(cut.reach(), &infos, &self.live)?;
                Ok(cut.apply(all, &self.cache))
            }
        }
    }

    /// The tensors' bytes, in the order of the resolved tensors.
    pub fn bytes(&self) -> Vec<&[u8]> {
        self.tensors.iter().map(|t| &*t.bytes).collect()
    }

    /// The same cache without its last `count` tokens. Nothing is copied.
    ///
    /// # Errors
    ///
    /// When there are fewer tokens, when a layer keeps a recurrent state, which no token can leave, and when a
    /// window has already lost rows that the next token would read. The view is unchanged then: layers are never
    /// trimmed one without the other.
    pub fn trim(&self, count: usize) -> Result<CacheView, Error> {
        let seen = self.tokens_seen();
        match seen.checked_sub(count) {
            Some(rest) => self.prefix(rest),
            None => Err(Error::new(
                ErrorKind::Usage,
                format!("cannot trim {count} tokens: the cache has seen {seen}"),
            )
            .field("tokens", count)
            .field("tokens_seen", seen)),
        }
    }

    /// The same cache as it was after its first `count` tokens. Nothing is copied.
    ///
    /// # Errors
    ///
    /// As [`CacheView::trim`].
    pub fn prefix(&self, count: usize) -> Result<CacheView, Error> {
        let seen = self.tokens_seen();
        if count > seen {
            let message = format!("a prefix of {count} tokens was asked for, the cache has seen {seen}");
            return Err(Error::new(ErrorKind::Usage, message)
                .field("tokens", count)
                .field("tokens_seen", seen));
        }
        let mut shorter = self.clone();
        if count < seen {
            shorter.cut = Some(Cut::new(self, count)?);
        }
        shorter.tokens = self.tokens.as_ref().map(|ids| ids[..count.min(ids.len())].to_vec());
        Ok(shorter)
    }

    /// Positions of the rows that one part of one layer holds, oldest first: runs of consecutive ones. A window
    /// with rows that stay has two runs.
    ///
    /// # Errors
    ///
    /// As [`Layout::resolve`].
    pub fn rows(&self, layer: usize, part: Part) -> Result<Vec<Range<i64>>, Error> {
        Ok(cut::runs(&self.resolve()?, layer, part))
    }

    /// A copy of one part of one layer in canonical order, decoded: packed bytes, the element type, the shape
    /// `[kv_head, row, lane]` and the position of the first row; see [`CacheView::rows`] for the others.
    ///
    /// # Errors
    ///
    /// When the layer keeps no such part.
    pub fn canonical(&self, layer: usize, part: Part) -> Result<(Vec<u8>, DType, [usize; 3], i64), Error> {
        let source = self.resolve()?;
        let stored = source.part(layer, part);
        // What codes stand for has the type of their scales.
        let dtype = stored.max_by_key(|b| b.role).map(|b| b.dtype);
        let whole = dtype.and_then(|dtype| source.canonical(layer, part, dtype));
        let Some((mut target, _)) = whole else {
            return self.nothing(layer, part);
        };
        // Rows that stay and rows that move on have a gap between them, and the copy has none.
        let runs = cut::runs(&source, layer, part);
        let block = target.blocks.remove(0);
        let (heads, lanes, dtype) = (block.heads.len(), block.lanes.len(), block.dtype);
        let count = runs.iter().map(cut::length).sum();
        let info = TensorInfo::contiguous("canonical", dtype, &[heads, count, lanes]);
        let strides_bytes = [0, 1, 2].map(|i| info.strides_bytes[i]);
        let mut first = 0;
        for rows in &runs {
            let offset_bytes = first * strides_bytes[1];
            first += cut::length(rows);
            target.blocks.push(Block { rows: rows.clone(), offset_bytes, strides_bytes, ..block.clone() });
        }
        target.tensors[0].len_bytes = info.len_bytes;
        let plan = plan(&source, &target, &self.cache)?;
        let mut bytes = vec![0; info.len_bytes];
        run(&plan, &self.bytes(), &mut [&mut bytes], &Threads::new(1), CopyOptions::default())?;
        Ok((bytes, dtype, [heads, count, lanes], runs[0].start))
    }

    /// The answer for a part of which no row is live: an empty copy, if the layer keeps such a part.
    fn nothing(&self, layer: usize, part: Part) -> Result<(Vec<u8>, DType, [usize; 3], i64), Error> {
        let kept = self.cache.layers.get(layer).and_then(|spec| spec.attention());
        let lanes = match (kept, part) {
            (Some((heads, key, _)), Part::Key) => Some((heads, key)),
            (Some((heads, _, value)), Part::Value) => Some((heads, value)),
            _ => None,
        };
        let Some((heads, lanes)) = lanes else {
            return Err(Error::new(ErrorKind::Usage, format!("layer {layer} keeps no {part}")));
        };
        let dtype = self.tensors.iter().map(|t| t.info.dtype).find(|d| d.name().contains("float"));
        Ok((Vec::new(), dtype.unwrap_or(DType::Float16), [heads, 0, lanes], 0))
    }
}
