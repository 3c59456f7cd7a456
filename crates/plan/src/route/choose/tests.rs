use std::collections::BTreeMap;

use kvbaton_layout::CacheSpec;

use super::*;
use crate::route::{
    Attention, Basis, CopyRate, DecodeFigure, Engine, Machine, ModelWork, Origin, Package, Phase, Power,
    PrefillFigure,
};

/// A model of 10⁹ weights, one wide attention layer.
fn work() -> ModelWork {
    ModelWork {
        active_weights: 1e9,
        weight_bytes: 2e9,
        attention: vec![Attention { layers: 10, width: 1024, window: None }],
    }
}

fn cache() -> CacheSpec {
    CacheSpec::full(10, 8, 64)
}

/// A machine on which Core ML takes `fixed` and then `core_ml` flop/s, MLX `mlx` flop/s.
fn machine(fixed: f64, core_ml: f64, mlx: f64) -> Machine {
    let mut figures = Vec::new();
    for tokens in [64, 256, 1024, 4096] {
        let flops = work().token_flops(tokens) + work().attention_flops(tokens);
        for (engine, seconds) in [(Engine::CoreMl, fixed + flops / core_ml), (Engine::Mlx, flops / mlx)] {
            let (model, dtype) = ("m".to_owned(), "float16".to_owned());
            figures.push(PrefillFigure { engine, model, dtype, tokens, seconds, source: None });
        }
    }
    let step = |engine, seconds| DecodeFigure {
        engine,
        model: "m".to_owned(),
        dtype: "float16".to_owned(),
        context: 512,
        seconds,
        source: None,
    };
    Machine {
        name: "test".to_owned(),
        origin: Origin::Measured,
        chips: Vec::new(),
        note: None,
        warm_copy: CopyRate { gigabytes_per_second: 50.0, source: None },
        cold_copy: Some(CopyRate { gigabytes_per_second: 5.0, source: None }),
        models: BTreeMap::from([("m".to_owned(), work())]),
        prefill: figures,
        decode: vec![step(Engine::Mlx, 0.01), step(Engine::CoreMl, 0.03)],
        handoff: Vec::new(),
        power: Vec::new(),
    }
}

fn package(lengths: &[usize], context: Option<usize>) -> Package {
    let dtype = "float16".to_owned();
    Package { lengths: lengths.to_vec(), context, weight_bytes: 2e9, dtype, element_bytes: 2 }
}

fn with<T>(
    machine: &Machine,
    prefill: Option<&Package>,
    context: usize,
    then: impl Fn(Request<'_>) -> T,
) -> T {
    then(Request {
        machine,
        work: &work(),
        cache: &cache(),
        context,
        max_tokens: 1,
        gpu_busy: 0.0,
        dtype: "float16",
        element_bytes: 2,
        prefill,
        decode: None,
    })
}

fn near(got: f64, want: f64) {
    assert!((got / want - 1.0).abs() < 1e-6, "{got} is not {want}");
}

#[test]
fn a_fast_gpu_is_not_handed_to() {
    let package = package(&[], Some(8192));
    let package = Package { lengths: vec![512], ..package };
    with(&machine(0.0, 1e12, 3e12), Some(&package), 4096, |r| {
        let choice = choose(&r, Objective::Ttft);
        assert_eq!((choice.pick, choice.break_even_tokens), (Some(Route::Mlx), None));
        assert!(choice.reason.starts_with("do not hand over"), "{}", choice.reason);
    });
}

#[test]
fn a_constant_that_pays_off_has_a_break_even() {
    let machine = machine(0.5, 4e12, 1e12);
    // 2e9·n·(1/1e12 − 1/4e12) = 0.5, but for attention and the copy: a little under 334.
    let package = package(&(1..=64).map(|n| n * 64).collect::<Vec<_>>(), None);
    with(&machine, Some(&package), 2048, |r| {
        let choice = choose(&r, Objective::Ttft);
        assert_eq!(choice.pick, Some(Route::CoreMlMlx));
        let from = choice.break_even_tokens.unwrap();
        assert!((300..400).contains(&from), "{from}");
        let at = |context| choose(&Request { context, ..r.clone() }, Objective::Ttft).pick;
        assert_eq!((at(from - 1), at(from)), (Some(Route::Mlx), Some(Route::CoreMlMlx)));
    });
}

#[test]
fn padding_is_computed_and_a_chunk_is_what_is_left_to_copy() {
    let machine = machine(0.0, 1e12, 1e12);
    let flops = |n| work().token_flops(n) + work().attention_flops(n);
    let split = |r: &Request<'_>| estimate(r).remove(0);
    with(&machine, Some(&package(&[128, 512], None)), 130, |r| {
        near(split(&r).prefill_seconds.unwrap(), flops(512) / 1e12);
        let bytes = 129 * 10 * 8 * 128 * 2;
        assert_eq!(split(&r).handoff_bytes, bytes);
        near(split(&r).exposed_seconds.unwrap(), 2.0 * bytes as f64 / 50e9);
    });
    with(&machine, Some(&package(&[512], Some(4096))), 1026, |r| {
        near(split(&r).prefill_seconds.unwrap(), flops(1536) / 1e12);
        near(split(&r).exposed_seconds.unwrap(), 2.0 * (10 * 8 * 128 * 2) as f64 / 50e9);
    });
}

#[test]
fn routes_without_their_package_are_estimated_and_unavailable() {
    with(&machine(0.0, 9e12, 1e12), None, 1024, |r| {
        let choice = choose(&r, Objective::Total);
        assert_eq!(choice.pick, Some(Route::Mlx));
        let split = &choice.routes[0];
        assert!(!split.available && split.total_seconds.is_some());
        assert_eq!(split.unavailable.as_deref(), Some("no --prefill was given"));
        assert!(choice.break_even_tokens.is_some());
    });
    with(&machine(0.0, 9e12, 1e12), Some(&package(&[512], None)), 1024, |r| {
        let split = &choose(&r, Objective::Total).routes[0];
        assert!(split.unavailable.as_deref().unwrap().contains("holds 512 rows, 1023 are wanted"));
    });
}

#[test]
fn a_busy_gpu_slows_mlx_alone() {
    with(&machine(0.0, 1e12, 1e12), Some(&package(&[1024], None)), 1025, |r| {
        let idle = estimate(&r);
        let busy = estimate(&Request { gpu_busy: 0.75, ..r.clone() });
        near(busy[1].prefill_seconds.unwrap(), 4.0 * idle[1].prefill_seconds.unwrap());
        near(busy[0].prefill_seconds.unwrap(), idle[0].prefill_seconds.unwrap());
        near(busy[0].first_step_seconds.unwrap(), 4.0 * idle[0].first_step_seconds.unwrap());
    });
}

#[test]
fn energy_needs_power_and_weighs_it() {
    let mut machine = machine(0.0, 1e12, 3e12);
    let package = package(&[1024], None);
    with(&machine, Some(&package), 1025, |r| {
        let choice = choose(&r, Objective::Energy);
        assert_eq!(choice.pick, None);
        assert!(choice.reason.contains("power is not known"), "{}", choice.reason);
    });
    for (engine, watts) in [(Engine::CoreMl, 2.0), (Engine::Mlx, 60.0)] {
        for phase in [Phase::Prefill, Phase::Decode] {
            machine.power.push(Power { engine, phase, watts, source: None });
        }
    }
    with(&machine, Some(&package), 1025, |r| {
        let choice = choose(&r, Objective::Energy);
        assert_eq!(choice.pick, Some(Route::CoreMlMlx));
        let split = &choice.routes[0];
        near(
            split.joules.unwrap(),
            2.0 * split.prefill_seconds.unwrap() + 60.0 * split.decode_seconds.unwrap(),
        );
        assert_eq!(choose(&r, Objective::Ttft).pick, Some(Route::Mlx));
    });
}

#[test]
fn another_models_figures_are_scaled_by_work() {
    let machine = machine(0.0, 1e12, 2e12);
    let twice = ModelWork { active_weights: 2e9, ..work() };
    with(&machine, None, 1025, |r| {
        let mlx = &estimate(&Request { work: &twice, ..r.clone() })[1];
        assert_eq!(mlx.basis, Some(Basis::Scaled));
        near(mlx.prefill_seconds.unwrap(), (twice.token_flops(1024) + twice.attention_flops(1024)) / 2e12);
        assert_eq!(estimate(&r)[1].basis, Some(Basis::Measured));
    });
}

#[test]
fn a_machine_says_what_is_wrong_with_it() {
    let check = |change: &dyn Fn(&mut Machine)| {
        let mut machine = machine(0.0, 1e12, 1e12);
        change(&mut machine);
        machine.check(|_| None).map_err(|e| e.to_string())
    };
    assert_eq!(check(&|_| ()), Ok(()));
    for (change, words) in [
        (&|m: &mut Machine| m.prefill[1].seconds = -1.0) as &dyn Fn(&mut Machine),
        &|m| m.warm_copy.gigabytes_per_second = f64::NAN,
        &|m| m.origin = Origin::Published,
        &|m| m.models.clear(),
        &|m| m.decode[0].model = "unheard-of".to_owned(),
    ]
    .into_iter()
    .zip(["prefill[1].seconds", "warm_copy", "names no source", "`m`", "`unheard-of`"])
    {
        let error = check(change).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
}
