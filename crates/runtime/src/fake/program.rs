//! What a fake runtime computes: little of its own, or whatever it is given.

use std::path::Path;
use std::sync::Arc;

use half::f16;
use kvbaton_layout::Part;

use crate::ArrayInfo;

/// A named tensor: its packed description and its bytes.
pub type Values = (String, ArrayInfo, Vec<u8>);

/// A function that a fake runtime runs.
pub trait Program {
    /// Names and descriptions of its states.
    fn states(&self) -> Vec<(String, ArrayInfo)>;

    /// Runs it over packed inputs, and changes states on the way. `leave` is given the packed bytes of each of the outputs
    /// `wanted`, with its index.
    ///
    /// # Errors
    ///
    /// What went wrong, in a sentence.
    fn run(
        &mut self,
        inputs: &[Values],
        states: &mut [Values],
        wanted: &[(String, ArrayInfo)],
        leave: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), String>;
}

/// Loads the function of a package that was asked for by name, or its only one.
pub type Programs = Arc<dyn Fn(&Path, Option<&str>) -> Result<Box<dyn Program>, String> + Send + Sync>;

/// Values of an element are whole numbers below this, which float16 holds exactly.
const VALUES: usize = 2039;

/// What neighbouring lanes differ by.
const LANE_STEP: usize = 3;

/// What the fake stores for an element: distinct for neighbours in every direction, exact in float16.
pub fn element(part: Part, layer: usize, head: usize, row: usize, lane: usize, token: u32) -> f32 {
    let mix = layer
        .wrapping_mul(31)
        .wrapping_add(head.wrapping_mul(17))
        .wrapping_add(row.wrapping_mul(7))
        .wrapping_add(lane.wrapping_mul(LANE_STEP))
        .wrapping_add(token as usize);
    let value = (mix % VALUES) as f32;
    if part == Part::Key { value } else { -value - 1.0 }
}

/// A program that computes nothing.
///
/// It is a prefill: its outputs `key_cache…` and `value_cache…` hold [`element`]s, rows of no token are NaN, and other
/// outputs are zero. A suffix `_3` says that the tensor starts with layer 3; an input `position` that its first row is
/// that far into the prompt.
pub(super) struct Elements;

impl Program for Elements {
    fn states(&self) -> Vec<(String, ArrayInfo)> {
        Vec::new()
    }

    fn run(
        &mut self,
        inputs: &[Values],
        _states: &mut [Values],
        wanted: &[(String, ArrayInfo)],
        leave: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), String> {
        let find = |name: &str| inputs.iter().find(|(n, ..)| n == name);
        let ids = find("input_ids").ok_or("no input `input_ids`")?;
        let words = |(_, _, bytes): &Values| -> Vec<u32> {
            bytes.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect()
        };
        let number = |name: &str| find(name).and_then(|v| words(v).first().copied()).map(|n| n as usize);
        let last = number("last_index").ok_or("no input `last_index`")?;
        let mut tokens = words(ids);
        tokens.truncate(last + 1);
        let first = number("position").unwrap_or(0);
        let part = |name: &str| match name {
            _ if name.starts_with("key_cache") => Some(Part::Key),
            _ if name.starts_with("value_cache") => Some(Part::Value),
            _ => None,
        };
        for (index, (name, info)) in wanted.iter().enumerate() {
            let bytes = match part(name) {
                Some(part) => {
                    let layer = name.rsplit_once('_').and_then(|(_, layer)| layer.parse().ok()).unwrap_or(0);
                    rows(info, part, layer, &tokens, first)
                }
                None => vec![0; info.packed_bytes()],
            };
            leave(index, &bytes);
        }
        Ok(())
    }
}

/// The elements of `[layer, head, row, lane]`: row `r` is that of `tokens[r]` at position `first + r`.
fn rows(info: &ArrayInfo, part: Part, first_layer: usize, tokens: &[u32], first: usize) -> Vec<u8> {
    let values: Vec<[u8; 2]> = (0..VALUES)
        .map(|v| if part == Part::Key { v as f32 } else { -(v as f32) - 1.0 })
        .map(|v| f16::from_f32(v).to_le_bytes())
        .collect();
    let [_, heads, slots, lanes] = info.shape[..] else { return vec![0; info.packed_bytes()] };
    let mut packed = vec![0; info.packed_bytes()];
    for (at, row) in packed.chunks_exact_mut(lanes * 2).enumerate() {
        let (layer, head, slot) = (at / (heads * slots), at / slots % heads, at % slots);
        let lanes = row.as_chunks_mut().0;
        let Some(&token) = tokens.get(slot) else {
            lanes.fill(f16::NAN.to_le_bytes());
            continue;
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole number below VALUES"
        )]
        let mut value = element(Part::Key, first_layer + layer, head, first + slot, 0, token) as usize;
        for lane in lanes {
            *lane = values[value];
            value = (value + LANE_STEP) % VALUES;
        }
    }
    packed
}
