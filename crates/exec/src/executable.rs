//! A loaded function, and how it runs.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use kvbaton_kernels::rows::Isa;
use kvbaton_mil::program::{Dim, Function, TensorType, ValueId, ValueType};
use kvbaton_mil::{ArrayFeature, FeatureKind, Package};

use crate::array::Array;
use crate::error::ExecError;
use crate::exchange::{decode, export};
use crate::footprint::{Footprint, footprint};
use crate::graph::Graph;
use crate::memory::Pool;
use crate::observe::Observed;
use crate::options::Options;
use crate::run::{Run, Watch};
use crate::shapes::Shapes;
use crate::state::State;
use crate::tensor::{Context, Tensor, integers, is_float};

/// An input or output of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Its name.
    pub name: String,
    /// Its type; dimensions known only at run time are [`Dim::Unknown`].
    pub ty: TensorType,
}

/// One function of a package: operations checked, ready to run on the CPU.
#[derive(Debug)]
pub struct Executable {
    package: Arc<Package>,
    function: String,
    /// The function as it is computed, where that is not how the package has it.
    retyped: Option<Box<Function>>,
    options: Options,
    footprint: Option<Footprint>,
    graph: Graph,
    inputs: Vec<Feature>,
    shapes: Vec<Shapes>,
    outputs: Vec<Feature>,
    states: Vec<Feature>,
    threads: rayon::ThreadPool,
    context: Context,
}

impl Executable {
    /// Loads `function` of `package`.
    ///
    /// # Errors
    ///
    /// When there is no such function, or an operation is missing or used in a form that is not handled; the message
    /// names function, operation and output.
    pub fn load(package: Arc<Package>, function: &str, options: &Options) -> Result<Executable, ExecError> {
        let f = package.function(Some(function))?;
        let feature = |id: &ValueId| {
            let value = f.value(*id);
            match &value.ty {
                ValueType::Tensor(ty) | ValueType::State(ty) => {
                    Ok(Feature { name: value.name.clone(), ty: ty.clone() })
                }
                other => Err(ExecError::FeatureType {
                    function: f.name.clone(),
                    name: value.name.clone(),
                    ty: format!("{other:?}"),
                }),
            }
        };
        let inputs = f.inputs.iter().map(feature).collect::<Result<Vec<_>, _>>()?;
        let outputs = f.block.outputs.iter().map(feature).collect::<Result<Vec<_>, _>>()?;
        let states = f.states.iter().map(feature).collect::<Result<Vec<_>, _>>()?;
        for feature in inputs.iter().chain(&outputs).chain(&states) {
            if !is_float(feature.ty.dtype) && integers(feature.ty.dtype, &[]).is_none() {
                let (name, ty) = (feature.name.clone(), feature.ty.to_string());
                return Err(ExecError::FeatureType { function: f.name.clone(), name, ty });
            }
        }
        let shapes =
            inputs.iter().map(|i| Shapes::of(described(&package, &f.name, &i.name), &i.ty)).collect();
        let typed = options.numerics.typed(f);
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .thread_name(|i| format!("kvbaton-exec-{i}"))
            .build()
            .map_err(|source| ExecError::Threads { threads: options.threads, source })?;
        let mut graph = crate::build::build(&package, &typed)?;
        if options.fuse {
            crate::fuse::fuse(&mut graph);
        }
        graph.plan_frees();
        let footprint = footprint(&graph, &typed, threads.current_num_threads(), options.keeps_weights());
        if let Some(footprint) = &footprint {
            footprint.check(&f.name, options.max_memory)?;
        }
        if options.keeps_weights() {
            threads.install(|| graph.keep_weights(Isa::best(), &options.cache));
        }
        let (isa, pool) = (options.numerics.isa(), Arc::new(Pool::default()));
        let context = Context { isa, pool, shown: Arc::default() };
        let function = f.name.clone();
        let retyped = match typed {
            Cow::Owned(function) => Some(Box::new(function)),
            Cow::Borrowed(_) => None,
        };
        let options = options.clone();
        tracing::debug!(function, nodes = graph.nodes.len(), isa = context.isa.name(), "loaded");
        Ok(Executable {
            package,
            function,
            retyped,
            options,
            footprint,
            graph,
            inputs,
            shapes,
            outputs,
            states,
            threads,
            context,
        })
    }

    /// Takes buffers of intermediate values from those that `other` has freed: for functions that run in turn.
    #[must_use]
    pub fn sharing_memory_with(mut self, other: &Executable) -> Executable {
        self.context.pool = Arc::clone(&other.context.pool);
        self
    }

    /// The function's name.
    pub fn function(&self) -> &str {
        &self.function
    }

    /// What it takes.
    pub fn inputs(&self) -> &[Feature] {
        &self.inputs
    }

    /// The shapes that each input may have, in the order of [`Executable::inputs`].
    pub fn input_shapes(&self) -> &[Shapes] {
        &self.shapes
    }

    /// What it gives.
    pub fn outputs(&self) -> &[Feature] {
        &self.outputs
    }

    /// What it keeps from one run to the next.
    pub fn states(&self) -> &[Feature] {
        &self.states
    }

    /// States for this function, zeroed, as Core ML makes them.
    ///
    /// # Errors
    ///
    /// When a state's shape is not fixed.
    pub fn new_state(&self) -> Result<State, ExecError> {
        State::new(&self.states)
    }

    /// Threads it runs on.
    pub fn threads(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// The most memory that intermediate values took at a time in any run so far, in bytes; 0 before the first.
    /// Weights stay in their mapping and are not counted, nor are the outputs.
    pub fn peak_bytes(&self) -> u64 {
        self.context.pool.peak_bytes()
    }

    /// The memory that the function takes, computed when it was loaded; `None` when a shape is only known when it
    /// runs.
    pub fn footprint(&self) -> Option<Footprint> {
        self.footprint
    }

    /// Memory for intermediate values that was allocated so far; it is kept for the next run.
    pub fn allocated_bytes(&self) -> u64 {
        self.context.pool.allocated_bytes()
    }

    /// Operations by how they run: `(name, nodes)`, for those who ask what was fused.
    pub fn census(&self) -> Vec<(String, usize)> {
        let mut counts: std::collections::BTreeMap<&str, usize> = std::collections::BTreeMap::new();
        for node in &self.graph.nodes {
            let name = match &node.work {
                crate::graph::Work::Op(_) | crate::graph::Work::Cond(_) | crate::graph::Work::Loop { .. } => {
                    node.kind.as_str()
                }
                crate::graph::Work::Rows(..) => "(rows)",
                crate::graph::Work::Attention(_) => "(attention)",
            };
            *counts.entry(name).or_default() += 1;
        }
        counts.into_iter().map(|(name, n)| (name.to_owned(), n)).collect()
    }

    /// Runs the function. Outputs come in the function's order; their memory starts on a page.
    ///
    /// # Errors
    ///
    /// When an input is missing, unknown, or of another type or shape than the function takes, or an operation is
    /// not defined for the values it meets (an index out of range), or the function has states.
    pub fn run(&self, inputs: &[(&str, Array)]) -> Result<Vec<(String, Array)>, ExecError> {
        let mut state = self.without_state()?;
        self.run_with(inputs, &mut state)
    }

    /// Runs the function on `state`, which may be another function's of the same package: states are found by name.
    ///
    /// # Errors
    ///
    /// As [`Executable::run`]; when a state is missing, of another type, or was lost by an earlier run. A run that
    /// fails on values loses the states it took.
    pub fn run_with(
        &self,
        inputs: &[(&str, Array)],
        state: &mut State,
    ) -> Result<Vec<(String, Array)>, ExecError> {
        self.threads.install(|| self.run_here(&self.graph, inputs, state, &mut Watch::default()))
    }

    /// Runs the function one operation after the other, nothing fused, and shows every result to `observer` in the
    /// program's order. The outputs are those of [`Executable::run_with`].
    ///
    /// # Errors
    ///
    /// As [`Executable::run_with`].
    pub fn run_observed(
        &self,
        inputs: &[(&str, Array)],
        state: &mut State,
        observer: &mut (dyn FnMut(Observed<'_>) + Send),
    ) -> Result<Vec<(String, Array)>, ExecError> {
        let unfused = if self.options.fuse {
            let program = self.program()?;
            let mut graph = crate::build::build(&self.package, program)?;
            graph.plan_frees();
            if self.options.keeps_weights() {
                self.threads.install(|| graph.keep_weights(Isa::best(), &self.options.cache));
            }
            Some(graph)
        } else {
            None
        };
        let graph = unfused.as_ref().unwrap_or(&self.graph);
        let mut watch = Watch { observer: Some(observer), seconds: None };
        self.threads.install(|| self.run_here(graph, inputs, state, &mut watch))
    }

    fn without_state(&self) -> Result<State, ExecError> {
        if self.states.is_empty() {
            return State::new(&[]);
        }
        let states = self.states.iter().map(|f| f.name.clone()).collect();
        Err(ExecError::NeedsState { function: self.function.clone(), states })
    }

    /// Runs the function and says how long each kind of node took, in seconds, the longest first.
    ///
    /// # Errors
    ///
    /// As [`Executable::run`].
    #[expect(clippy::type_complexity, reason = "the pair of a run's result and its profile")]
    pub fn profile(
        &self,
        inputs: &[(&str, Array)],
    ) -> Result<(Vec<(String, Array)>, Vec<(String, f64)>), ExecError> {
        let mut state = self.without_state()?;
        let mut watch = Watch { observer: None, seconds: Some(HashMap::new()) };
        let outputs = self.threads.install(|| self.run_here(&self.graph, inputs, &mut state, &mut watch))?;
        let mut seconds: Vec<(String, f64)> = watch.seconds.into_iter().flatten().collect();
        seconds.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok((outputs, seconds))
    }

    /// The function with the types that its values are computed in.
    fn program(&self) -> Result<&Function, ExecError> {
        match &self.retyped {
            Some(function) => Ok(function),
            None => Ok(self.package.function(Some(&self.function))?),
        }
    }

    fn run_here(
        &self,
        graph: &Graph,
        inputs: &[(&str, Array)],
        state: &mut State,
        watch: &mut Watch<'_>,
    ) -> Result<Vec<(String, Array)>, ExecError> {
        let function = self.program()?;
        let mut values: Vec<Option<Tensor>> = vec![None; graph.values.len()];
        let context = Context { shown: Arc::default(), ..self.context.clone() };
        self.bind(inputs, function, &mut values)?;
        self.states.iter().try_for_each(|feature| state.check(feature))?;
        for (feature, (id, _)) in self.states.iter().zip(&graph.states) {
            values[id.0 as usize] = Some(state.take(&self.context, feature)?);
        }
        // Where the load could not compute what a run takes, the run itself stops at the limit.
        let limit_bytes = self.options.max_memory.filter(|_| self.footprint.is_none());
        let mut run = Run { cx: &context, function, values, watch, limit_bytes };
        run.graph(graph)?;
        let start = std::time::Instant::now();
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for (feature, output) in self.outputs.iter().zip(&graph.outputs) {
            let tensor = run.operand(output, &[]).decompressed(&context);
            let array = export(&self.context, feature, &tensor).map_err(|reason| ExecError::Run {
                function: self.function.clone(),
                op: "output".to_owned(),
                output: feature.name.clone(),
                reason,
            })?;
            outputs.push((feature.name.clone(), array));
        }
        for (feature, (_, last)) in self.states.iter().zip(&graph.states) {
            let tensor = run.operand(last, &[]);
            state.put(&self.context, &feature.name, tensor).map_err(|reason| ExecError::Run {
                function: self.function.clone(),
                op: "write_state".to_owned(),
                output: feature.name.clone(),
                reason,
            })?;
        }
        if let Some(seconds) = &mut run.watch.seconds {
            *seconds.entry("outputs".to_owned()).or_default() += start.elapsed().as_secs_f64();
        }
        Ok(outputs)
    }

    /// Checks the inputs and turns them into values.
    fn bind(
        &self,
        inputs: &[(&str, Array)],
        function: &Function,
        values: &mut [Option<Tensor>],
    ) -> Result<(), ExecError> {
        let expected = || self.inputs.iter().map(|f| f.name.clone()).collect::<Vec<_>>();
        for (i, (name, _)) in inputs.iter().enumerate() {
            let twice = inputs[..i].iter().any(|(other, _)| other == name);
            if twice || !self.inputs.iter().any(|f| f.name == *name) {
                return Err(ExecError::UnexpectedInput { name: (*name).to_owned(), expected: expected() });
            }
        }
        for ((feature, shapes), id) in self.inputs.iter().zip(&self.shapes).zip(&function.inputs) {
            let Some((_, array)) = inputs.iter().find(|(name, _)| *name == feature.name) else {
                return Err(ExecError::MissingInput { name: feature.name.clone(), expected: expected() });
            };
            let fits = array.dtype() == feature.ty.dtype
                && array.shape().len() == feature.ty.shape.len()
                && array.shape().iter().zip(&feature.ty.shape).all(|(n, d)| match d {
                    Dim::Fixed(m) => n == m,
                    Dim::Unknown => true,
                });
            let mismatch = || ExecError::InputType {
                name: feature.name.clone(),
                expected: feature.ty.clone(),
                have: TensorType {
                    dtype: array.dtype(),
                    shape: array.shape().iter().map(|n| Dim::Fixed(*n)).collect(),
                },
            };
            if !fits {
                return Err(mismatch());
            }
            if !shapes.allow(array.shape()) {
                return Err(ExecError::InputShape {
                    name: feature.name.clone(),
                    allowed: shapes.clone(),
                    have: array.shape().to_vec(),
                });
            }
            let (dtype, shape) = (array.dtype(), array.shape());
            // Floats are read where they are: a cache may be most of the machine's memory.
            let value = Tensor::given(dtype, shape.to_vec(), array.bytes().clone())
                .or_else(|| decode(&self.context, dtype, shape, array.bytes()));
            values[id.0 as usize] = Some(value.ok_or_else(mismatch)?);
        }
        Ok(())
    }
}

/// What the package says of an input.
fn described<'a>(package: &'a Package, function: &str, input: &str) -> Option<&'a ArrayFeature> {
    let features = package.description().functions.get(function)?;
    match &features.inputs.iter().find(|f| f.name == input)?.kind {
        FeatureKind::Array(array) => Some(array),
        FeatureKind::Other(_) => None,
    }
}
