//! A cache somewhere in memory.

use kvbaton_copy::{CopyOptions, Threads, run};
use kvbaton_layout::{
    Block, BoundTensor, CacheSpec, DType, Encoding, Layout, LiveRows, ModelSpec, Part, Resolved, Role,
    TensorInfo,
};
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

    /// A copy of one part of one layer in canonical order: packed bytes, the element type, the shape
    /// `[kv_head, row, lane]` and the position of the first row.
    ///
    /// # Errors
    ///
    /// When the layer keeps no such part.
    pub fn canonical(&self, layer: usize, part: Part) -> Result<(Vec<u8>, DType, [usize; 3], i64), Error> {
        let source = self.resolve()?;
        let mut blocks = source.blocks.iter().filter(|b| (b.layer, b.part) == (layer, part));
        let Some(first) = blocks.next() else {
            return Err(Error::new(ErrorKind::Usage, format!("layer {layer} keeps no {part}")));
        };
        let (mut heads, mut rows, lanes, dtype) =
            (first.heads.clone(), first.rows.clone(), first.lanes.clone(), first.dtype);
        for block in blocks {
            heads = heads.start.min(block.heads.start)..heads.end.max(block.heads.end);
            rows = rows.start.min(block.rows.start)..rows.end.max(block.rows.end);
        }
        let count = usize::try_from(rows.end - rows.start).unwrap_or(0);
        let shape = [heads.len(), count, lanes.len()];
        let info = TensorInfo::contiguous("canonical", dtype, &shape);
        let target = Block {
            layer,
            part,
            role: Role::Elements,
            encoding: Encoding::Plain,
            heads,
            rows: rows.clone(),
            lanes,
            tensor: 0,
            dtype,
            offset_bytes: 0,
            strides_bytes: [info.strides_bytes[0], info.strides_bytes[1], info.strides_bytes[2]],
        };
        let target = Resolved {
            blocks: vec![target],
            tensors: vec![BoundTensor { name: info.name.clone(), len_bytes: info.len_bytes, writable: true }],
            tokens_seen: source.tokens_seen,
        };
        let plan = plan(&source, &target, &self.cache)?;
        let mut bytes = vec![0; info.len_bytes];
        run(&plan, &self.bytes(), &mut [&mut bytes], &Threads::new(1), CopyOptions::default())?;
        Ok((bytes, dtype, shape, rows.start))
    }
}
