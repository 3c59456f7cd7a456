//! Copies of a cache in memory of its own, in another element type or quantised.

use kvbaton_copy::{CopyOptions, CopyStats, OnOverflow, Threads, run};
use kvbaton_layout::{
    CacheSpec, DType, Encoding, LayerSpec, Layout, LiveRows, Part, Role, Sizes, TensorInfo,
};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_plan::plan;

use crate::{CacheView, Error, ErrorKind, Tensor};

/// Rows of full layers from slot 0 on, windows as rings, states as mlx-lm has them.
const OWNED: &str = r#"
name = "kvbaton-owned"
description = "A copy that kvbaton made"
placement = "left"
sliding_placement = "ring-indexed"

[[tensor]]
name = "conv_{layer}"
holds = "conv"
axes = "batch row channel"
placement = "left"

[[tensor]]
name = "state_{layer}"
holds = "state"
axes = "batch kv_head value_dim key_dim"
"#;

/// One rule for keys or values.
fn rule(name: &str, part: &str, layers: &str, more: &str) -> String {
    format!(
        "\n[[tensor]]\nname = \"{name}_{{layer}}\"\nholds = \"{part}\"\naxes = \"batch kv_head row head_dim\"\n\
         layers = \"{layers}\"\n{more}"
    )
}

impl CacheView {
    /// A copy whose elements are of type `dtype`; codes are decoded.
    ///
    /// # Errors
    ///
    /// When values do not fit the type and `on_overflow` makes that an error.
    pub fn cast(
        &self,
        dtype: DType,
        on_overflow: OnOverflow,
        threads: &Threads,
    ) -> Result<(CacheView, CopyStats), Error> {
        if !matches!(dtype, DType::Float16 | DType::BFloat16 | DType::Float32) {
            return Err(Error::new(ErrorKind::Usage, format!("a cache cannot be cast to {dtype}"))
                .hint("float16, bfloat16 or float32; for codes, quantize"));
        }
        let layout = owned_layout(None)?;
        self.copied(layout, &|_, _, _| dtype, on_overflow, threads)
    }

    /// A copy with keys and values of full layers in MLX's affine codes; windows and recurrent states keep their
    /// type, because mlx-lm has no quantised caches for them.
    ///
    /// # Errors
    ///
    /// When no layer can be quantised, when there are no such codes, or when groups do not divide the heads.
    pub fn quantize(
        &self,
        bits: u8,
        group_size: usize,
        threads: &Threads,
    ) -> Result<(CacheView, CopyStats), Error> {
        if !self.cache().layers.iter().any(|l| matches!(l, LayerSpec::Full { .. })) {
            let message = "no layer can be quantised: all keep windows or recurrent states";
            return Err(
                Error::new(ErrorKind::Usage, message).hint("mlx-lm quantises caches of full attention")
            );
        }
        let layout = owned_layout(Some((bits, group_size)))?;
        let source = self.resolve()?;
        let dtype = |layer: usize, part: Part, role: Role| {
            let stored = source.part(layer, part).max_by_key(|b| b.role).map_or(DType::Float16, |b| b.dtype);
            let coded = matches!(self.cache().layers[layer], LayerSpec::Full { .. });
            if coded && role == Role::Elements { DType::UInt32 } else { stored }
        };
        self.copied(layout, &dtype, OnOverflow::Error, threads)
    }

    /// How the rows of a layer are encoded.
    ///
    /// # Errors
    ///
    /// As [`Layout::resolve`].
    pub fn encoding(&self, layer: usize) -> Result<Encoding, Error> {
        let resolved = self.resolve()?;
        Ok(resolved.blocks.iter().find(|b| b.layer == layer).map_or(Encoding::Plain, |b| b.encoding))
    }

    fn copied(
        &self,
        layout: Layout,
        dtype: &dyn Fn(usize, Part, Role) -> DType,
        on_overflow: OnOverflow,
        threads: &Threads,
    ) -> Result<(CacheView, CopyStats), Error> {
        let live = LiveRows::seen(self.tokens_seen());
        let infos = tensors(&layout, self.cache(), live.tokens_seen, dtype)?;
        let target = layout.resolve(self.cache(), &infos, &live)?;
        let plan = plan(&self.resolve()?, &target, self.cache())?;
        let mut buffers: Vec<Buffer> = infos.iter().map(|i| Buffer::zeroed(i.len_bytes)).collect();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(|b| &mut **b).collect();
        let stats = run(&plan, &self.bytes(), &mut slices, threads, CopyOptions { on_overflow })?;
        let tensors =
            infos.into_iter().zip(buffers).map(|(info, b)| Tensor { info, bytes: Bytes::new(b) }).collect();
        let mut copy =
            CacheView::new(layout, self.cache().clone(), tensors, live)?.with_model(self.model().cloned());
        if let Some(tokens) = self.tokens() {
            copy = copy.with_tokens(tokens.to_vec());
        }
        Ok((copy, stats))
    }
}

fn owned_layout(affine: Option<(u8, usize)>) -> Result<Layout, Error> {
    let mut text = OWNED.to_owned();
    for (name, part) in [("keys", "key"), ("values", "value")] {
        text += &rule(name, part, "sliding", "");
        let Some((bits, group_size)) = affine else {
            text += &rule(name, part, "full", "");
            continue;
        };
        for (suffix, role) in [("", "elements"), ("_scales", "scale"), ("_biases", "bias")] {
            let more =
                format!("role = \"{role}\"\nencoding = {{ bits = {bits}, group_size = {group_size} }}\n");
            text += &rule(&format!("{name}{suffix}"), part, "full", &more);
        }
    }
    Ok(Layout::from_toml(&text)?)
}

/// The layout's tensors for `rows` rows; windows take no more slots than they have rows.
fn tensors(
    layout: &Layout,
    cache: &CacheSpec,
    rows: usize,
    dtype: &dyn Fn(usize, Part, Role) -> DType,
) -> Result<Vec<TensorInfo>, Error> {
    let sizes = Sizes { capacity: rows, dtype: DType::Float16, block_rows: 1, row_stride_bytes: None };
    let mut infos = layout.tensors(cache, &sizes)?;
    for info in &mut infos {
        let (name, layer) = info.name.rsplit_once('_').unwrap_or((&info.name, "0"));
        let layer: usize = layer.parse().unwrap_or(0);
        let part = match name.split('_').next() {
            Some("keys") => Part::Key,
            Some("values") => Part::Value,
            Some("conv") => Part::Conv,
            _ => Part::State,
        };
        let role = match name.rsplit('_').next() {
            Some("scales") => Role::Scale,
            Some("biases") => Role::Bias,
            _ => Role::Elements,
        };
        let mut shape = info.shape.clone();
        if let Some(window) = cache.layers.get(layer).and_then(LayerSpec::window) {
            shape[2] = window.size.min(rows);
        }
        *info = TensorInfo::contiguous(info.name.clone(), dtype(layer, part, role), &shape);
    }
    Ok(infos)
}
