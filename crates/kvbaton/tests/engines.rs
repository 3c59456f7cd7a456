//! One contract for every engine: the executor, the fake runtime, and Core ML where there is one.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvbaton::fake::open_on_runtime;
use kvbaton::layout::{CacheSpec, ModelSpec, Part, presets};
use kvbaton::runtime::fake::{FakeRuntime, Habits, Tally, element};
use kvbaton::runtime::{CompileCache, Session, Units};
use kvbaton::{CpuPrefill, Engine, EngineOptions, ErrorKind, Prefill, RuntimePrefill, Stated, open_prefill};

fn package(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../mil/testdata").join(name)
}

/// What `two_functions.mlpackage`, which says nothing of itself, must be told.
fn stated() -> Stated {
    let model = serde_json::json!({
        "architecture": "llama", "vocab_size": 48, "dtype": "float16",
        "rope": {"kind": "half-split", "theta": 10000.0, "dims": 32, "scaling": {"kind": "default"}},
        "layers": CacheSpec::full(2, 2, 32),
    });
    let model: ModelSpec = serde_json::from_value(model).unwrap();
    Stated { layout: Some(presets::get("kvbaton-stacked").unwrap()), model: Some(model) }
}

fn fake_session() -> Session<FakeRuntime> {
    Session::new(|| {
        FakeRuntime::new(Habits { row_align_bytes: 96, ..Habits::default() }, Arc::new(Tally::default()))
    })
}

fn fake(path: &Path) -> RuntimePrefill<FakeRuntime> {
    RuntimePrefill::open(fake_session(), path, None, stated()).unwrap()
}

/// The engines of this system. On a Mac Core ML is one of them.
fn engines() -> Vec<Box<dyn Prefill>> {
    let path = package("two_functions.mlpackage");
    let mut engines: Vec<Box<dyn Prefill>> =
        vec![Box::new(CpuPrefill::open_stated(&path, 1, stated()).unwrap()), Box::new(fake(&path))];
    if cfg!(target_os = "macos") {
        let options = EngineOptions {
            engine: Some(Engine::CoreMl),
            units: Some(Units::Cpu),
            timeout: Some(Duration::from_secs(120)),
            stated: stated(),
            ..EngineOptions::default()
        };
        engines.push(open_prefill(&path, options).unwrap());
    }
    engines
}

#[test]
fn every_engine_describes_the_package_in_the_same_words() {
    for engine in engines() {
        let functions: Vec<_> = engine.functions().iter().map(|f| (f.name.as_str(), f.tokens)).collect();
        assert_eq!(functions, [("prefill_8", 8), ("prefill_16", 16)], "{}", engine.engine());
        assert_eq!(engine.model().unwrap().vocab_size, 48);
        assert_eq!(engine.layout().name, "kvbaton-stacked");
    }
}

#[test]
fn every_engine_takes_the_shortest_function_and_leaves_a_row_a_token() {
    for mut engine in engines() {
        for (count, function) in [(1, "prefill_8"), (8, "prefill_8"), (9, "prefill_16"), (16, "prefill_16")] {
            let tokens: Vec<u32> = (0..count).collect();
            engine.prepare(tokens.len()).unwrap();
            let done = engine.prefill(&tokens).unwrap();
            assert_eq!((done.report.function.as_str(), done.report.tokens), (function, tokens.len()));
            assert_eq!(done.report.engine, engine.engine());
            assert_eq!(done.cache.tokens_seen(), tokens.len());
            assert_eq!(done.cache.tokens(), Some(&tokens[..]));
            assert_eq!(done.logits.unwrap().values.len(), 48);
            // Two layers of keys and values, every row of the prompt in each.
            let rows: usize =
                done.cache.resolve().unwrap().blocks.iter().map(|b| b.extents()[0] * b.extents()[1]).sum();
            assert_eq!(rows, 2 * 2 * 2 * tokens.len(), "{}", engine.engine());
        }
    }
}

#[test]
fn every_engine_refuses_the_same_prompts() {
    for mut engine in engines() {
        let mut kind = |tokens: &[u32]| engine.prefill(tokens).unwrap_err().kind();
        assert_eq!(kind(&[]), ErrorKind::EmptyPrompt);
        assert_eq!(kind(&[1; 17]), ErrorKind::PromptTooLong);
        assert_eq!(kind(&[1, 48]), ErrorKind::Usage);
        assert!(engine.prefill(&[1, 47]).is_ok(), "{}", engine.engine());
    }
}

/// A model split in two, on the engines of this system.
fn chains() -> Vec<Box<dyn Prefill>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/chain");
    let on = |engine| EngineOptions { engine: Some(engine), ..EngineOptions::default() };
    let habits = Habits { row_align_bytes: 96, ..Habits::default() };
    let mut engines = vec![
        open_prefill(&path, on(Engine::Cpu)).unwrap(),
        open_on_runtime(&path, habits, EngineOptions::default()).unwrap(),
    ];
    if cfg!(target_os = "macos") {
        let options = EngineOptions { units: Some(Units::Cpu), ..on(Engine::CoreMl) };
        engines.push(open_prefill(&path, options).unwrap());
    }
    engines
}

/// The live values of every layer.
fn values(engine: &mut dyn Prefill, tokens: &[u32]) -> Vec<f32> {
    let view = engine.prefill(tokens).unwrap().cache;
    let parts = (0..2).flat_map(|layer| [Part::Key, Part::Value].map(|part| (layer, part)));
    let bytes: Vec<u8> = parts.flat_map(|(layer, part)| view.canonical(layer, part).unwrap().0).collect();
    bytes.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect()
}

#[test]
fn every_engine_runs_a_chain_in_one_step_and_in_chunks() {
    let mut engines = chains();
    for count in [5, 20] {
        let tokens: Vec<u32> = (0..count).map(|i| (5 * i + 1) % 48).collect();
        let expected = values(&mut *engines[0], &tokens);
        for engine in &mut engines[1..] {
            let own = values(&mut **engine, &tokens);
            assert_eq!(own.len(), expected.len());
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            let cosine = dot(&own, &expected) / (dot(&own, &own) * dot(&expected, &expected)).sqrt();
            assert!(cosine > 0.999, "{}, {count} tokens: {cosine}", engine.engine());
            assert_eq!(engine.chunk_times().len(), if count == 5 { 0 } else { 3 });
        }
    }
}

#[test]
fn a_package_that_says_nothing_of_itself_is_refused_by_every_engine() {
    let path = package("two_functions.mlpackage");
    let cpu = CpuPrefill::open(&path, 1).err().unwrap();
    let fake = RuntimePrefill::open(fake_session(), &path, None, Stated::default()).err().unwrap();
    assert_eq!(cpu.to_string(), fake.to_string());
    assert_eq!(cpu.kind(), ErrorKind::Layout);
}

#[test]
fn a_compiled_model_is_the_package_that_it_was_compiled_from() {
    let folder = tempfile::tempdir().unwrap();
    let compiled = folder.path().join("m.mlmodelc");
    std::fs::create_dir(&compiled).unwrap();
    let schema = |tokens: usize| {
        let array = |name: &str, dtype: &str, shape: &str| serde_json::json!({"name": name, "dataType": dtype, "shape": shape, "type": "MultiArray"});
        let cache = format!("[2, 2, {tokens}, 32]");
        serde_json::json!({
            "name": format!("prefill_{tokens}"),
            "inputSchema": [
                array("input_ids", "Int32", &format!("[1, {tokens}]")), array("last_index", "Int32", "[1]"),
            ],
            "outputSchema": [
                array("logits", "Float16", "[1, 48]"), array("key_cache", "Float16", &cache),
                array("value_cache", "Float16", &cache),
            ],
            "stateSchema": [],
        })
    };
    let document = serde_json::json!([{"userDefinedMetadata": {}, "functions": [schema(16), schema(8)]}]);
    std::fs::write(compiled.join("metadata.json"), document.to_string()).unwrap();

    let tokens = [3, 1, 4, 1, 5];
    let mut caches = Vec::new();
    for path in [package("two_functions.mlpackage"), compiled] {
        let mut engine = fake(&path);
        assert_eq!(engine.functions().len(), 2);
        let view = engine.prefill(&tokens).unwrap().cache;
        let tensor = &view.tensors()[0];
        let at: usize = [1, 1, 4, 31].iter().zip(&tensor.info.strides_bytes).map(|(i, s)| i * s).sum();
        let value = half::f16::from_le_bytes([tensor.bytes[at], tensor.bytes[at + 1]]).to_f32();
        assert_eq!(value, element(Part::Key, 1, 1, 4, 31, 5));
        caches.push((tensor.info.clone(), tensor.bytes.to_vec()));
    }
    assert_eq!(caches[0].0, caches[1].0);
    assert!(caches[0].1 == caches[1].1, "the same bytes, padding included");
}

#[test]
fn a_package_is_compiled_into_the_cache_under_its_digest() {
    let folder = tempfile::tempdir().unwrap();
    let original = package("two_functions.mlpackage");
    // The fake "compiles" to the package itself, which the cache moves away: it gets a copy.
    let copy = folder.path().join("p.mlpackage");
    copy_folder(&original, &copy);
    let session = fake_session().with_cache(CompileCache::new(folder.path().join("cache")));
    let mut engine = RuntimePrefill::open(session, &copy, Some(Units::Cpu), stated()).unwrap();
    engine.prefill(&[1]).unwrap();
    engine.prefill(&[1; 9]).unwrap();
    let entries: Vec<_> = std::fs::read_dir(folder.path().join("cache")).unwrap().collect();
    assert_eq!(entries.len(), 1);
    assert!(engine.loaded().values().all(|l| l.units == Units::Cpu));
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}
