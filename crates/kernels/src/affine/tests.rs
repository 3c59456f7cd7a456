use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

/// What MLX wrote for one row.
struct Golden<'a> {
    scheme: Affine,
    elem: Elem,
    values: &'a [u8],
    packed: &'a [u8],
    scales: &'a [u8],
    biases: &'a [u8],
    back: &'a [u8],
}

/// The cases of `testdata/affine.bin`, whose generator lies beside it.
fn golden() -> Vec<Golden<'static>> {
    let mut rest: &[u8] = include_bytes!("../../testdata/affine.bin");
    let mut take = |bytes: usize| {
        let (head, tail) = rest.split_at_checked(bytes)?;
        rest = tail;
        Some(head)
    };
    let mut cases = vec![];
    while let Some(header) = take(16) {
        let [bits, group, dtype, lanes]: [usize; 4] =
            std::array::from_fn(|n| u32::from_le_bytes(header[n * 4..][..4].try_into().unwrap()) as usize);
        let scheme = Affine::new(bits as u32, group).unwrap();
        let elem = [Elem::F16, Elem::BF16, Elem::F32][dtype];
        let groups = scheme.groups(lanes) * elem.bytes();
        let mut next = |bytes| take(bytes).expect("a whole case");
        cases.push(Golden {
            scheme,
            elem,
            values: next(lanes * elem.bytes()),
            packed: next(scheme.packed_bytes(lanes)),
            scales: next(groups),
            biases: next(groups),
            back: next(lanes * elem.bytes()),
        });
    }
    cases
}

fn quantized(cpu: Cpu, scheme: Affine, elem: Elem, values: &[u8]) -> [Vec<u8>; 3] {
    let lanes = values.len() / elem.bytes();
    let mut packed = vec![0xA5; scheme.packed_bytes(lanes)];
    let [mut scales, mut biases] = [(); 2].map(|()| vec![0xA5; scheme.groups(lanes) * elem.bytes()]);
    quantize_on(cpu, scheme, elem, values, &mut packed, &mut scales, &mut biases);
    [packed, scales, biases]
}

#[test]
fn rows_quantise_to_the_bits_of_mlx() {
    let cases = golden();
    assert_eq!(cases.len(), 6 * 3 * (4 + 3 + 3));
    for cpu in Cpu::all() {
        for (n, case) in cases.iter().enumerate() {
            let got = quantized(cpu, case.scheme, case.elem, case.values);
            let expected = [case.packed, case.scales, case.biases];
            assert_eq!(got, expected, "case {n}: {:?} {:?} on {cpu:?}", case.scheme, case.elem);
        }
    }
}

#[test]
fn codes_dequantise_to_the_bits_of_mlx() {
    for cpu in Cpu::all() {
        for (n, case) in golden().iter().enumerate() {
            let mut got = vec![0xA5; case.back.len()];
            dequantize_on(cpu, case.scheme, case.elem, case.packed, case.scales, case.biases, &mut got);
            assert_eq!(got, case.back, "case {n}: {:?} {:?} on {cpu:?}", case.scheme, case.elem);
        }
    }
}

fn schemes() -> impl Strategy<Value = Affine> {
    (prop::sample::select(vec![2, 3, 4, 5, 6, 8]), prop::sample::select(vec![32, 64, 128]))
        .prop_map(|(bits, group)| Affine::new(bits, group).unwrap())
}

/// Finite floats of every size.
fn finite() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -4.0_f32..4.0,
        2 => -6e4_f32..6e4,
        1 => any::<f32>().prop_map(|v| if v.is_finite() { v } else { 0.0 }),
        1 => (-400..400_i32).prop_map(|v| v as f32 / 8.0),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_body_matches_the_definition(scheme in schemes(), groups in 1..24_usize,
                                         seed in prop::collection::vec(finite(), 128 * 24)) {
        let values = &seed[..groups * scheme.group()];
        let mut codes = vec![0; values.len()];
        let mut expected = (vec![], vec![]);
        for (values, codes) in values.chunks(scheme.group()).zip(codes.chunks_mut(scheme.group())) {
            let (scale, bias) = definition::encode(scheme.bits(), values, codes);
            expected.0.extend(scale.to_le_bytes());
            expected.1.extend(bias.to_le_bytes());
        }
        let mut packed = vec![0; scheme.packed_bytes(values.len())];
        packing::pack(scheme.bits(), &codes, &mut packed);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        for cpu in Cpu::all() {
            let got = quantized(cpu, scheme, Elem::F32, &bytes);
            prop_assert_eq!(&got[1], &expected.0, "scales on {:?}", cpu);
            prop_assert_eq!(&got[2], &expected.1, "biases on {:?}", cpu);
            prop_assert_eq!(&got[0], &packed, "codes on {:?}", cpu);
        }
    }

    #[test]
    fn values_match_the_definition(scheme in schemes(), codes in prop::collection::vec(any::<u8>(), 256),
                                   scale in -0.5_f32..0.5, bias in -9.0_f32..9.0) {
        let codes: Vec<u8> = codes.iter().map(|code| code & ((1_u32 << scheme.bits()) - 1) as u8).collect();
        let mut packed = vec![0; scheme.packed_bytes(256)];
        packing::pack(scheme.bits(), &codes, &mut packed);
        let (scale, bias) = (f16::from_f32(scale), f16::from_f32(bias));
        let (narrow, wide) = (bf16::from_f32(scale.to_f32()), bf16::from_f32(bias.to_f32()));
        let many = |bytes: [u8; 2]| bytes.repeat(scheme.groups(256));
        for (elem, scales, biases, s, b) in [
            (Elem::F16, many(scale.to_le_bytes()), many(bias.to_le_bytes()), scale.to_f32(), bias.to_f32()),
            (Elem::BF16, many(narrow.to_le_bytes()), many(wide.to_le_bytes()), narrow.to_f32(), wide.to_f32()),
        ] {
            let expected: Vec<u8> = codes
                .iter()
                .flat_map(|&code| {
                    let value = definition::decode(elem, code, s, b);
                    match elem {
                        Elem::F16 => f16::from_f32(value).to_le_bytes(),
                        _ => bf16::from_f32(value).to_le_bytes(),
                    }
                })
                .collect();
            for cpu in Cpu::all() {
                let mut got = vec![0; 512];
                dequantize_on(cpu, scheme, elem, &packed, &scales, &biases, &mut got);
                prop_assert_eq!(&got, &expected, "{:?} on {:?}", elem, cpu);
            }
        }
    }
}

#[test]
fn widths_that_mlx_lacks_are_refused() {
    assert_eq!(Affine::new(7, 64), Err(AffineError::Bits { bits: 7 }));
    assert_eq!(
        Affine::new(7, 64).unwrap_err().to_string(),
        "no affine quantisation with 7 bits; MLX has 2, 3, 4, 5, 6 and 8"
    );
}

#[test]
fn groups_that_mlx_lacks_are_refused() {
    assert_eq!(Affine::new(8, 48), Err(AffineError::Group { group: 48 }));
}

#[test]
#[should_panic(expected = "bytes of scales")]
fn a_slice_of_the_wrong_length_is_refused() {
    let scheme = Affine::new(8, 64).unwrap();
    affine_quantize(scheme, Elem::F16, &[0; 256], &mut [0; 128], &mut [0; 2], &mut [0; 4]);
}
