//! The rungs that need no model, against caches whose every element says where it is.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvbaton::fake::{FakePrefill, Habits};
use kvbaton::layout::{
    CacheSpec, DType, Encoding, LayerSpec, Layout, LiveRows, ModelSpec, Part, TensorInfo, Window,
};
use kvbaton::verify::{
    PromptReport, Rung, RungName, Status, Thresholds, Verdict, VerifyReport, compare_bytes, compare_values,
    repeat_prefill,
};
use kvbaton::{
    CacheView, Error, ErrorKind, FunctionInfo, HandoffOptions, OnOverflow, Prefill, Prefilled, Target,
    Tensor, Threads, hand_off,
};
use kvbaton_memory::{Buffer, Bytes};
use serde_json::{Map, json};

const ROWS: &str = "name = \"rows\"\nplacement = \"left\"\n\
    [[tensor]]\nname = \"keys_{layer}\"\nholds = \"key\"\naxes = \"kv_head row head_dim\"\n\
    [[tensor]]\nname = \"values_{layer}\"\nholds = \"value\"\naxes = \"kv_head row head_dim\"\n";

fn source(layers: usize, tokens: usize, align: usize) -> CacheView {
    let habits = Habits { row_align_bytes: align, ..Habits::default() };
    let mut engine = FakePrefill::new(CacheSpec::full(layers, 2, 5), &[16], habits).unwrap();
    let ids: Vec<u32> = (0..u32::try_from(tokens).unwrap()).map(|i| i * i + 1).collect();
    engine.prefill(&ids).unwrap().cache
}

/// `view` handed over into packed tensors of `dtype`, which `spoil` may change: layer, part, elements as bytes.
fn arrived(view: &CacheView, dtype: DType, spoil: impl Fn(usize, Part, &mut [u8])) -> CacheView {
    let layout = Layout::from_toml(ROWS).unwrap();
    let tokens = view.tokens_seen();
    let mut infos = Vec::new();
    for layer in 0..view.cache().layers.len() {
        for name in ["keys", "values"] {
            infos.push(TensorInfo::contiguous(format!("{name}_{layer}"), dtype, &[2, tokens + 3, 5]));
        }
    }
    let mut buffers: Vec<Buffer> = infos.iter().map(|i| Buffer::zeroed(i.len_bytes)).collect();
    let mut targets: Vec<Target<'_>> = infos
        .iter()
        .zip(&mut buffers)
        .map(|(info, buffer)| Target { info: info.clone(), bytes: buffer })
        .collect();
    let live = LiveRows::seen(tokens);
    hand_off(view, &layout, &live, &mut targets, &Threads::new(1), HandoffOptions::default()).unwrap();
    let parts = [Part::Key, Part::Value];
    for (at, buffer) in buffers.iter_mut().enumerate() {
        spoil(at / 2, parts[at % 2], buffer);
    }
    let tensors =
        infos.into_iter().zip(buffers).map(|(info, b)| Tensor { info, bytes: Bytes::new(b) }).collect();
    CacheView::new(layout, view.cache().clone(), tensors, live).unwrap()
}

#[test]
fn a_faithful_hand_off_has_equal_digests_in_every_type() {
    for align in [0, 64] {
        let left = source(3, 7, align);
        for dtype in [DType::Float16, DType::BFloat16, DType::Float32] {
            let rung = compare_bytes(&left, &arrived(&left, dtype, |_, _, _| {})).unwrap();
            assert_eq!(rung.status, Status::Pass, "{rung:?}");
            assert_eq!(rung.figures["source_digest"], rung.figures["arrived_digest"]);
            assert_eq!(rung.figures["elements"], json!(3 * 2 * 2 * 7 * 5));
            assert_eq!(rung.figures["dtype"], json!(dtype.name()));
        }
    }
}

/// Every element of one layer, each flipped in its lowest bit: found and named.
#[test]
fn any_flipped_bit_is_found_where_it_is() {
    let left = source(2, 4, 0);
    for (head, row, lane) in (0..2).flat_map(|h| (0..4).flat_map(move |r| (0..5).map(move |l| (h, r, l)))) {
        let right = arrived(&left, DType::Float16, |layer, part, bytes| {
            if (layer, part) == (1, Part::Value) {
                bytes[2 * ((head * 7 + row) * 5 + lane)] ^= 1;
            }
        });
        let rung = compare_bytes(&left, &right).unwrap();
        let place = rung.place.unwrap();
        assert_eq!(rung.status, Status::Fail);
        assert_eq!(rung.figures["differing"], json!(1));
        assert_ne!(rung.figures["source_digest"], rung.figures["arrived_digest"]);
        assert_eq!(place.tensor.as_deref(), Some("value"));
        assert_eq!((place.layer, place.head, place.lane), (Some(1), Some(head), Some(lane)));
        assert_eq!(place.row, i64::try_from(row).ok());
        assert!(rung.note.unwrap().contains("bit 0 is flipped"));
    }
}

/// Rows that are not live hold anything: padding of the source, spare rows of the target.
#[test]
fn what_is_not_live_is_not_compared() {
    let left = source(2, 4, 0);
    let right = arrived(&left, DType::Float32, |_, _, bytes| {
        let row = 5 * 4;
        for head in 0..2 {
            bytes[(head * 7 + 4) * row..(head * 7 + 7) * row].fill(0xff);
        }
    });
    assert_eq!(compare_bytes(&left, &right).unwrap().status, Status::Pass);
    let values = compare_values(&left, &right, &Thresholds::default(), DType::Float16).unwrap();
    assert_eq!((values.status, &values.figures["nan"]), (Status::Pass, &json!(0)));
}

#[test]
fn a_row_less_is_named() {
    let left = source(2, 5, 0);
    let rung = compare_bytes(&left, &left.prefix(4).unwrap()).unwrap();
    assert_eq!((rung.status, rung.place.unwrap().row), (Status::Fail, Some(4)));
    assert!(rung.note.unwrap().contains("seen 5 tokens, what arrived 4"));
}

/// A window's oldest row is not read by the next token, and need not arrive.
#[test]
fn rows_that_no_token_will_read_may_stay_behind() {
    let window = Window { size: 4, keep: 0 };
    let layer = LayerSpec::Sliding { kv_heads: 1, key_dim: 2, value_dim: 2, window };
    let view = |first: i64, live: usize| {
        let elements: Vec<u8> =
            (0..2 * live).flat_map(|i| (first as f32 * 2.0 + i as f32).to_ne_bytes()).collect();
        let tensors = ["keys_0", "values_0"].map(|name| Tensor {
            info: TensorInfo::contiguous(name, DType::Float32, &[1, live, 2]),
            bytes: Bytes::new(Buffer::copy_of(&elements)),
        });
        let live = LiveRows { live: Some(live), ..LiveRows::seen(9) };
        CacheView::new(
            Layout::from_toml(ROWS).unwrap(),
            CacheSpec { layers: vec![layer] },
            tensors.into(),
            live,
        )
        .unwrap()
    };
    let whole = view(5, 4);
    assert_eq!(compare_bytes(&whole, &view(6, 3)).unwrap().status, Status::Pass);
    let rung = compare_bytes(&whole, &view(7, 2)).unwrap();
    assert_eq!((rung.status, rung.place.unwrap().row), (Status::Fail, Some(6)));
}

/// Codes are decoded as they are written down, for every width; what arrived quantised is not compared by bytes
/// with what left as numbers.
#[test]
fn quantised_caches_are_read_by_the_definition() {
    let habits = Habits::default();
    let mut engine = FakePrefill::new(CacheSpec::full(2, 2, 64), &[16], habits).unwrap();
    let left = engine.prefill(&[5, 6, 7]).unwrap().cache;
    for bits in [2, 3, 4, 5, 6, 8] {
        let (coded, _) = left.quantize(bits, 32, &Threads::new(1)).unwrap();
        assert_eq!(coded.encoding(0).unwrap(), Encoding::Affine { bits, group_size: 32 });
        let (decoded, _) = coded.cast(DType::Float16, OnOverflow::Error, &Threads::new(1)).unwrap();
        assert_eq!(compare_bytes(&coded, &decoded).unwrap().status, Status::Pass, "{bits} bits");
        assert_eq!(compare_bytes(&coded, &coded).unwrap().status, Status::Pass);
        let rung = compare_bytes(&left, &coded).unwrap();
        assert_eq!(rung.status, Status::NotRun);
        assert!(rung.note.unwrap().contains("bytes cannot be compared"));
    }
}

#[test]
fn caches_of_other_geometry_are_refused() {
    let (a, b) = (source(2, 4, 0), {
        let mut engine = FakePrefill::new(CacheSpec::full(2, 2, 6), &[16], Habits::default()).unwrap();
        engine.prefill(&[1, 2, 3, 4]).unwrap().cache
    });
    assert_eq!(compare_bytes(&a, &b).unwrap_err().kind(), ErrorKind::Incompatible);
    let values = compare_values(&a, &b, &Thresholds::default(), DType::Float32);
    assert_eq!(values.unwrap_err().kind(), ErrorKind::Incompatible);
}

#[test]
fn values_too_large_for_the_decoder_s_type_have_a_place() {
    let left = source(2, 4, 0);
    let wide = arrived(&left, DType::Float32, |layer, part, bytes| {
        if (layer, part) == (1, Part::Key) {
            let at = 4 * ((7 + 2) * 5 + 3);
            bytes[at..at + 4].copy_from_slice(&70000_f32.to_ne_bytes());
        }
    });
    let limits =
        Thresholds { max_row_error: 1e9, max_norm_error: 1e9, min_cosine: 0.0, ..Thresholds::default() };
    let rung = compare_values(&left, &wide, &limits, DType::Float16).unwrap();
    assert_eq!((rung.status, &rung.figures["overflow"]), (Status::Fail, &json!(1)));
    assert_eq!(rung.place.unwrap().to_string(), "key, layer 1, head 1, row 2, lane 3");
    assert_eq!(compare_values(&left, &wide, &limits, DType::BFloat16).unwrap().status, Status::Pass);
}

/// An engine that is not steady: one lane of its second cache is off.
struct Drifting {
    engine: FakePrefill,
    runs: usize,
}

impl Prefill for Drifting {
    fn engine(&self) -> &'static str {
        self.engine.engine()
    }

    fn functions(&self) -> &[FunctionInfo] {
        self.engine.functions()
    }

    fn model(&self) -> Option<&ModelSpec> {
        None
    }

    fn layout(&self) -> &Layout {
        self.engine.layout()
    }

    fn prepare(&mut self, tokens: usize) -> Result<(), Error> {
        self.engine.prepare(tokens)
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        let mut done = self.engine.prefill(tokens)?;
        self.runs += 1;
        let drifts = self.runs == 2;
        done.cache = arrived(&done.cache, DType::Float16, |layer, part, bytes| {
            if drifts && (layer, part) == (1, Part::Key) {
                bytes[2 * (7 + 2) * 5] ^= 1;
            }
        });
        Ok(done)
    }
}

#[test]
fn a_producer_that_is_not_deterministic_is_told_from_one_that_is() {
    let engine = || FakePrefill::new(CacheSpec::full(2, 2, 5), &[16], Habits::default()).unwrap();
    let tokens = [1, 2, 3, 4];
    // Its buffers are held while a cache lives: runs may not overlap.
    let (_, steady) = repeat_prefill(&mut engine(), &tokens, 4).unwrap();
    assert!(steady.deterministic);
    let (_, drifting) = repeat_prefill(&mut Drifting { engine: engine(), runs: 0 }, &tokens, 3).unwrap();
    assert_eq!((drifting.deterministic, drifting.run), (false, Some(2)));
    assert_eq!(drifting.place.as_ref().unwrap().to_string(), "key, layer 1, head 1, row 2, lane 0");

    let passed = RungName::ALL.map(|name| rung(name, Status::Pass, false)).to_vec();
    let facts = Map::from_iter([("producer".to_owned(), json!(drifting))]);
    let report = VerifyReport::new(vec![PromptReport::new(passed, facts)], Thresholds::default(), Map::new());
    assert_eq!(report.verdict, Verdict::Fail);
    assert!(report.reason.contains("the producer is not deterministic"), "{}", report.reason);
}

fn rung(name: RungName, status: Status, tie: bool) -> Rung {
    let document = json!({"name": name, "status": status, "where": null, "tie": tie, "note": null});
    serde_json::from_value(document).unwrap()
}

#[test]
fn a_verdict_is_the_worst_of_its_rungs() {
    let verdict = |status: Status, tie: bool| {
        let rungs = RungName::ALL.map(|name| {
            if name == RungName::FreeRunning {
                rung(name, status, tie)
            } else {
                rung(name, Status::Pass, false)
            }
        });
        PromptReport::new(rungs.to_vec(), Map::new()).verdict
    };
    assert_eq!(verdict(Status::Pass, false), Verdict::Pass);
    assert_eq!(verdict(Status::Pass, true), Verdict::Tie);
    assert_eq!(verdict(Status::NotRun, false), Verdict::Incomplete);
    assert_eq!(verdict(Status::Fail, false), Verdict::Fail);
    // What nobody ran is no pass, and neither is nothing at all.
    assert_eq!(PromptReport::new(Vec::new(), Map::new()).verdict, Verdict::Incomplete);
    let nothing = VerifyReport::new(Vec::new(), Thresholds::default(), Map::new());
    assert_eq!(nothing.verdict, Verdict::Incomplete);
}

#[test]
fn a_failure_hides_no_other_rung_and_no_other_prompt() {
    let clean = RungName::ALL.map(|name| rung(name, Status::Pass, false)).to_vec();
    let mut broken = clean.clone();
    broken[1] = rung(RungName::Values, Status::Fail, false);
    broken[4] = rung(RungName::FreeRunning, Status::NotRun, false);
    let prompts = [clean, broken].map(|rungs| PromptReport::new(rungs, Map::new())).to_vec();
    let report = VerifyReport::new(prompts, Thresholds::default(), Map::new());
    let found: Vec<Status> = report.rungs.iter().map(|r| r.status).collect();
    assert_eq!(found, [Status::Pass, Status::Fail, Status::Pass, Status::Pass, Status::NotRun]);
    assert_eq!(report.verdict, Verdict::Fail);
    assert_eq!(report.rungs[1].place.as_ref().and_then(|p| p.prompt), Some(1));
    assert_eq!(report.rungs[1].figures["failed"], json!(1));
}

#[test]
fn what_is_infinite_in_one_prompt_is_so_over_all() {
    let prompt = |kl: serde_json::Value| {
        let logits: Rung = serde_json::from_value(
            json!({"name": "logits", "status": "fail", "where": null, "max_kl": kl, "max_difference": 0.5}),
        )
        .unwrap();
        PromptReport::new(vec![logits], Map::new())
    };
    let prompts = vec![prompt(json!(0.25)), prompt(json!(null)), prompt(json!(0.5))];
    let report = VerifyReport::new(prompts, Thresholds::default(), Map::new());
    assert_eq!(report.rungs[2].figures["max_kl"], json!(null));
    assert_eq!(report.rungs[2].figures["max_difference"], json!(0.5));
}

/// The keys of two heads of 2 lanes, four rows, each row of head 1 twice as long; `change` says what is found.
fn keys(change: impl Fn(usize, usize, [f32; 2]) -> [f32; 2]) -> CacheView {
    let layout = Layout::from_toml(ROWS).unwrap();
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for head in 0..2_u8 {
        for row in 0..4_u8 {
            let angle = f32::from(row) * 0.7 + f32::from(head);
            let long = f32::from(head + 1);
            let [a, b] = change(head.into(), row.into(), [long * angle.cos(), long * angle.sin()]);
            keys.extend([a, b]);
            values.extend([1.0, f32::from(row)]);
        }
    }
    let tensor = |name: &str, values: &[f32]| {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.copy_from_slice(&bytes);
        Tensor { info: TensorInfo::contiguous(name, DType::Float32, &[2, 4, 2]), bytes: Bytes::new(buffer) }
    };
    let tensors = vec![tensor("keys_0", &keys), tensor("values_0", &values)];
    CacheView::new(layout, CacheSpec::full(1, 2, 2), tensors, LiveRows::seen(4)).unwrap()
}

#[test]
fn keys_are_turned_where_those_of_all_heads_are() {
    let right = keys(|_, _, k| k);
    let turn = |k: [f32; 2], by: f32| {
        let (s, c) = by.sin_cos();
        [k[0] * c - k[1] * s, k[0] * s + k[1] * c]
    };
    let note = |found: &CacheView| {
        let rung = compare_values(&right, found, &Thresholds::default(), DType::Float32).unwrap();
        assert_eq!(rung.status, Status::Fail);
        rung.note.unwrap_or_default()
    };
    let all = keys(|_, row, k| turn(k, row as f32 * 0.3));
    assert!(note(&all).contains("the rotary base"), "{}", note(&all));
    let one = keys(|head, row, k| if head == 1 { turn(k, row as f32 * 0.3) } else { k });
    assert!(!note(&one).contains("rotary"), "{}", note(&one));
}

#[test]
fn values_of_which_no_row_is_on_both_sides_are_not_compared() {
    let whole = source(2, 8, 0);
    let empty = whole.trim(8).unwrap();
    let compare =
        |a: &CacheView, b: &CacheView| compare_values(a, b, &Thresholds::default(), DType::Float32).unwrap();
    for rung in [compare(&whole, &empty), compare(&empty, &whole)] {
        assert_eq!(rung.status, Status::NotRun);
        assert!(rung.note.unwrap().contains("no row of the keys of layer 0"));
    }
    assert_eq!(compare(&empty, &empty).status, Status::Pass);
}

#[test]
fn thresholds_that_are_none_are_refused() {
    for wrong in [f64::NAN, -0.1, f64::INFINITY] {
        let error = Thresholds { max_kl: wrong, ..Thresholds::default() }.check().unwrap_err();
        assert!(error.to_string().contains("max_kl"), "{error}");
    }
    for wrong in [
        Thresholds { min_cosine: 1.1, ..Thresholds::default() },
        Thresholds { min_agreement: 1.5, ..Thresholds::default() },
    ] {
        assert!(wrong.check().unwrap_err().to_string().contains("1 is the most"));
    }
    assert!(Thresholds::default().check().is_ok());
    assert!(Thresholds { min_cosine: 1.0, ..Thresholds::default() }.check().is_ok());
}

#[test]
fn a_coarse_decoder_is_given_more_room_and_no_open_door() {
    let fine = Thresholds::usual(DType::Float32);
    assert_eq!(fine, Thresholds::default());
    assert_eq!(fine, Thresholds::usual(DType::Float16));
    let coarse = Thresholds::usual(DType::BFloat16);
    assert!(coarse.check().is_ok());
    assert!(coarse.tie > fine.tie && coarse.max_kl > fine.max_kl && coarse.min_cosine < fine.min_cosine);
    // A row that never arrived, or was exchanged for another, is off by 1 or more.
    assert!(coarse.max_row_error > fine.max_row_error && coarse.max_row_error < 1.0);
}
