//! Shorter pasts, casts, codes, scans and fills of views, against numbers that say where they are.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;

use kvbaton::layout::{CacheSpec, DType, LayerSpec, Layout, LiveRows, Part, TensorInfo, Window};
use kvbaton::{
    CacheView, ErrorKind, HandoffOptions, OnOverflow, Target, Tensor, Threads, Unusual, Wanted, hand_off_to,
};
use kvbaton_memory::{Buffer, Bytes};

const WHOLE: &str = "name = \"whole\"\n\
    [[tensor]]\nname = \"keys_{layer}\"\nholds = \"key\"\naxes = \"row head_dim\"\n\
    [[tensor]]\nname = \"values_{layer}\"\nholds = \"value\"\naxes = \"row head_dim\"\n";

const STATE: &str = "name = \"state\"\n\
    [[tensor]]\nname = \"state_{layer}\"\nholds = \"state\"\naxes = \"value_dim key_dim\"\n";

fn full(lanes: usize) -> LayerSpec {
    LayerSpec::Full { kv_heads: 1, key_dim: lanes, value_dim: lanes }
}

fn sliding(lanes: usize, size: usize, keep: usize) -> LayerSpec {
    LayerSpec::Sliding { kv_heads: 1, key_dim: lanes, value_dim: lanes, window: Window { size, keep } }
}

fn placed(placement: &str) -> Layout {
    Layout::from_toml(&format!("placement = \"{placement}\"\n{WHOLE}")).unwrap()
}

/// A view whose slot `s` of every layer and part holds `value(s, lane)`.
fn view(
    layers: &[LayerSpec],
    placement: &str,
    [slots, lanes]: [usize; 2],
    live: LiveRows,
    value: impl Fn(usize, usize) -> f32,
) -> CacheView {
    let elements = (0..slots * lanes).map(|i| value(i / lanes, i % lanes));
    let bytes: Vec<u8> = elements.flat_map(f32::to_ne_bytes).collect();
    let tensors = (0..layers.len())
        .flat_map(|l| [format!("keys_{l}"), format!("values_{l}")])
        .map(|name| Tensor {
            info: TensorInfo::contiguous(name, DType::Float32, &[slots, lanes]),
            bytes: Bytes::new(Buffer::copy_of(&bytes)),
        })
        .collect();
    CacheView::new(placed(placement), CacheSpec { layers: layers.to_vec() }, tensors, live).unwrap()
}

/// One lane that holds the number of its slot.
fn slots(layer: LayerSpec, placement: &str, count: usize, live: LiveRows) -> CacheView {
    view(&[layer], placement, [count, 1], live, |s, _| s as f32)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
}

fn keys(view: &CacheView, layer: usize) -> Vec<f32> {
    let (bytes, dtype, ..) = view.canonical(layer, Part::Key).unwrap();
    assert_eq!(dtype, DType::Float32);
    floats(&bytes)
}

#[test]
fn a_trim_shows_fewer_rows_and_copies_none() {
    let whole = view(&[full(2)], "left", [8, 2], LiveRows::seen(6), |s, _| s as f32);
    let shorter = whole.trim(2).unwrap();
    assert_eq!((whole.tokens_seen(), shorter.tokens_seen()), (6, 4));
    assert_eq!(keys(&shorter, 0), [0., 0., 1., 1., 2., 2., 3., 3.]);
    assert_eq!(shorter.tensors()[0].bytes.as_ptr(), whole.tensors()[0].bytes.as_ptr());
    assert_eq!(keys(&shorter.trim(3).unwrap(), 0), [0., 0.]);
    assert_eq!(shorter.prefix(0).unwrap().tokens_seen(), 0);
    assert_eq!(keys(&whole, 0).len(), 12);
}

/// The buffer of a whole context still has the rows that the window of a shorter past reads.
#[test]
fn a_window_in_a_long_buffer_moves_back() {
    let whole = slots(sliding(1, 3, 0), "left", 10, LiveRows::seen(9));
    assert_eq!(keys(&whole, 0), [6., 7., 8.]);
    assert_eq!(keys(&whole.prefix(5).unwrap(), 0), [2., 3., 4.]);
    assert_eq!(keys(&whole.prefix(2).unwrap(), 0), [0., 1.]);
}

#[test]
fn a_ring_gives_up_the_one_row_that_the_next_token_does_not_read() {
    let ring = slots(sliding(1, 4, 0), "ring", 4, LiveRows::seen(10));
    assert_eq!(keys(&ring, 0), [2., 3., 0., 1.]); // slots of the positions 6, 7, 8, 9
    assert_eq!(keys(&ring.trim(1).unwrap(), 0), [2., 3., 0.]);
    let error = ring.trim(2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("window of 4 of layer 0 no longer holds row 5"), "{error}");
}

#[test]
fn a_ring_with_rows_that_stay_needs_them_too() {
    let live = LiveRows { ring_start: Some(2), ..LiveRows::seen(10) };
    let ring = slots(sliding(1, 5, 2), "ring-indexed", 5, live);
    assert_eq!(ring.rows(0, Part::Key).unwrap(), [0..2, 7..10]);
    assert_eq!(keys(&ring, 0), [0., 1., 2., 3., 4.]);
    assert_eq!(ring.trim(1).unwrap().rows(0, Part::Value).unwrap(), [0..2, 7..9]);
    assert!(ring.trim(2).is_err());
}

#[test]
fn a_recurrent_state_gives_up_no_token() {
    let spec = LayerSpec::Recurrent { conv_steps: 0, conv_channels: 0, heads: 1, value_dim: 1, key_dim: 1 };
    let state = Tensor {
        info: TensorInfo::contiguous("state_0", DType::Float32, &[1, 1]),
        bytes: Bytes::new(Buffer::zeroed(4)),
    };
    let (layout, cache) = (Layout::from_toml(STATE).unwrap(), CacheSpec { layers: vec![spec] });
    let view = CacheView::new(layout, cache, vec![state], LiveRows::seen(3)).unwrap();
    assert!(view.trim(1).unwrap_err().to_string().contains("recurrent state holds all 3"));
    assert_eq!(view.trim(0).unwrap().tokens_seen(), 3);
}

#[test]
fn longer_than_the_past_is_refused() {
    let whole = slots(full(1), "left", 4, LiveRows::seen(3));
    assert!(whole.trim(4).unwrap_err().to_string().contains("cannot trim 4 tokens: the cache has seen 3"));
    assert!(whole.prefix(4).unwrap_err().to_string().contains("a prefix of 4 tokens"));
}

#[test]
fn a_cast_rounds_to_the_type_and_says_what_did_not_fit() {
    let layers = [full(2), sliding(2, 3, 0)];
    let source = view(&layers, "left", [5, 2], LiveRows::seen(5), |s, l| 1e4 * (s * 2 + l) as f32);
    let threads = Threads::new(1);
    let error = source.cast(DType::Float16, OnOverflow::Error, &threads).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overflow);
    let (clamped, stats) = source.cast(DType::Float16, OnOverflow::Clamp, &threads).unwrap();
    // Of 0, 10,000 … 90,000 three are above 65,504, in keys and values of both layers.
    assert_eq!(stats.overflow, 12);
    let (bytes, dtype, shape, first) = clamped.canonical(1, Part::Value).unwrap();
    assert_eq!((dtype, shape, first), (DType::Float16, [1, 3, 2], 2));
    let halves: Vec<f32> =
        bytes.as_chunks::<2>().0.iter().map(|b| half::f16::from_ne_bytes(*b).to_f32()).collect();
    assert_eq!(halves, [4e4, 5e4, 6e4, 65504., 65504., 65504.].map(|x| half::f16::from_f32(x).to_f32()));
    let (wide, _) = clamped.cast(DType::Float32, OnOverflow::Error, &threads).unwrap();
    assert_eq!(keys(&wide, 1), halves);
    assert!(source.cast(DType::Int8, OnOverflow::Error, &threads).is_err());
}

#[test]
fn codes_are_for_full_layers_and_decode_to_what_they_stand_for() {
    let threads = Threads::new(1);
    let layers = [full(32), sliding(32, 4, 0)];
    // Sixteen values a group, which 4 bits hold exactly: the first code is that of the value farthest from zero.
    let source = view(&layers, "left", [6, 32], LiveRows::seen(6), |s, l| ((s + l) % 16) as f32);
    let (coded, _) = source.quantize(4, 32, &threads).unwrap();
    assert_eq!(coded.encoding(0).unwrap().to_string(), "4-bit affine in groups of 32");
    assert_eq!(coded.encoding(1).unwrap().to_string(), "plain");
    assert_eq!(keys(&coded, 0), keys(&source, 0));
    assert_eq!(keys(&coded.trim(1).unwrap(), 0), keys(&source.trim(1).unwrap(), 0));
    let windows = view(&[sliding(32, 4, 0)], "left", [6, 32], LiveRows::seen(6), |_, _| 0.0);
    let error = windows.quantize(4, 32, &threads).unwrap_err().to_string();
    assert!(error.contains("no layer can be quantised"), "{error}");
    let error = source.quantize(4, 64, &threads).unwrap_err().to_string();
    assert!(error.contains("groups of 64 do not divide 32 lanes"), "{error}");
}

#[test]
fn a_scan_names_what_is_no_number_or_too_large() {
    let source = view(&[full(2)], "left", [8, 2], LiveRows::seen(4), |s, l| match (s, l) {
        (1, 0) => f32::NAN,
        (2, 1) => f32::NEG_INFINITY,
        (3, 0) => -7e4,
        (5, _) => f32::NAN, // not live
        _ => 3.0,
    });
    let scan = source.scan(DType::Float16, 4).unwrap();
    assert_eq!((scan.nan, scan.infinity, scan.overflow, scan.largest), (2, 2, 2, 7e4));
    let places: Vec<_> = scan.places.iter().map(|p| (p.kind, p.tensor, p.row, p.lane)).collect();
    let want = [
        (Unusual::Nan, Part::Key, 1, 0),
        (Unusual::Infinity, Part::Key, 2, 1),
        (Unusual::Overflow, Part::Key, 3, 0),
        (Unusual::Nan, Part::Value, 1, 0),
    ];
    assert_eq!(places, want);
    assert_eq!(source.scan(DType::BFloat16, 0).unwrap().overflow, 0);
}

/// Keys of a fresh target, filled from rows that hold their position.
fn filled(placement: &str, live: &LiveRows, rows: Option<Range<i64>>) -> Vec<f32> {
    let source = slots(full(1), "left", 12, LiveRows::seen(live.tokens_seen));
    let (layout, cache) = (placed(placement), source.cache().clone());
    let mut memory = vec![vec![0xAA_u8; 4 * 5]; 2];
    let infos = ["keys_0", "values_0"].map(|name| TensorInfo::contiguous(name, DType::Float32, &[5, 1]));
    let mut targets: Vec<Target<'_>> =
        infos.into_iter().zip(&mut memory).map(|(info, bytes)| Target { info, bytes }).collect();
    let wanted = Wanted { layout: &layout, cache: &cache, live, rows, whole: &[] };
    let options = HandoffOptions { fresh: true, ..HandoffOptions::default() };
    hand_off_to(&source, &wanted, &mut targets, &Threads::new(1), options).unwrap();
    floats(&memory[0])
}

#[test]
fn a_fresh_target_is_zero_where_no_row_is() {
    assert_eq!(filled("left", &LiveRows::seen(3), None), [0., 1., 2., 0., 0.]);
    assert_eq!(filled("right", &LiveRows::seen(3), None), [0., 0., 0., 1., 2.]);
    let padded = LiveRows { pad: Some(1), ..LiveRows::seen(3) };
    assert_eq!(filled("left-padded", &padded, None), [0., 0., 1., 2., 0.]);
    let turned = LiveRows { ring_start: Some(4), ..LiveRows::seen(3) };
    assert_eq!(filled("ring-from", &turned, None), [1., 2., 0., 0., 0.]);
}

#[test]
fn only_the_rows_that_are_wanted_are_copied() {
    assert_eq!(filled("left", &LiveRows::seen(4), Some(2..4)), [0., 0., 2., 3., 0.]);
}
