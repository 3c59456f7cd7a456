//! A cache somewhere in memory.

use kvbaton_copy::{CopyOptions, Threads, run};
use kvbaton_layout::{CacheSpec, DType, Layout, LiveRows, ModelSpec, Part, Resolved, TensorInfo};
use kvbaton_memory::Bytes;
use kvbaton_plan::plan;

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
        let tensors: Vec<Tensor> = tensors.into_iter().filter(|t| names.contains(&t.info.name)).collect();
        let view = CacheView { layout, cache, model: None, tensors, live, tokens: None };
        view.resolve()?;
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

    /// The live rows.
    pub fn live(&self) -> &LiveRows {
        &self.live
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
        Ok(self.layout.resolve(&self.cache, &infos, &self.live)?)
    }

    /// The tensors' bytes, in the order of the resolved tensors.
    pub fn bytes(&self) -> Vec<&[u8]> {
        self.tensors.iter().map(|t| &*t.bytes).collect()
    }

    /// A copy of one part of one layer in canonical order, decoded: packed bytes, the element type, the shape
    /// `[kv_head, row, lane]` and the position of the first row.
    ///
    /// # Errors
    ///
    /// When the layer keeps no such part.
    pub fn canonical(&self, layer: usize, part: Part) -> Result<(Vec<u8>, DType, [usize; 3], i64), Error> {
        let source = self.resolve()?;
        let stored = source.part(layer, part);
        // What codes stand for has the type of their scales.
        let dtype = stored.max_by_key(|b| b.role).map(|b| b.dtype);
        let canonical = dtype.and_then(|dtype| source.canonical(layer, part, dtype));
        let Some((target, info)) = canonical else {
            return Err(Error::new(ErrorKind::Usage, format!("layer {layer} keeps no {part}")));
        };
        let (dtype, first) = (info.dtype, target.blocks[0].rows.start);
        let shape = [info.shape[0], info.shape[1], info.shape[2]];
        let plan = plan(&source, &target, &self.cache)?;
        let mut bytes = vec![0; info.len_bytes];
        run(&plan, &self.bytes(), &mut [&mut bytes], &Threads::new(1), CopyOptions::default())?;
        Ok((bytes, dtype, shape, first))
    }
}
