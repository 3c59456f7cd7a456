//! Which memory an output gets.
//!
//! A surface holds an array as an image: its last dimension is the width, the product of the others the height. Both
//! have limits, and they are asked of the system: published ones differ (16,384 is guaranteed, newer GPUs take twice
//! as much). Whether the Neural Engine also wants powers of two is disputed; nothing here depends on it, `selftest`
//! records it.

use serde::{Deserialize, Serialize};

use crate::{Element, Memory};

/// How large a surface may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurfaceLimits {
    /// Elements of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

impl SurfaceLimits {
    /// What every system is documented to take.
    pub const GUARANTEED: SurfaceLimits = SurfaceLimits { width: 16_384, height: 16_384 };

    /// The limits that a system reported; an answer of 0 means that it does not know.
    pub fn reported(width: usize, height: usize) -> SurfaceLimits {
        let or = |value: usize, known: usize| if value == 0 { known } else { value };
        SurfaceLimits {
            width: or(width, SurfaceLimits::GUARANTEED.width),
            height: or(height, SurfaceLimits::GUARANTEED.height),
        }
    }
}

/// Which memory, and why not the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Which.
    pub memory: Memory,
    /// Why it is no surface; `None` where it is one.
    pub because: Option<String>,
}

/// Chooses the memory of an output.
pub fn choose_memory(element: Element, shape: &[usize], limits: SurfaceLimits) -> Choice {
    let heap = |because: String| Choice { memory: Memory::Heap, because: Some(because) };
    if element != Element::Float16 {
        return heap(format!("surfaces hold float16, this is {element:?}").to_lowercase());
    }
    let Some((&width, outer)) = shape.split_last() else {
        return heap("a scalar is no image".to_owned());
    };
    let height = outer.iter().try_fold(1usize, |rows, &n| rows.checked_mul(n));
    match height {
        _ if width > limits.width => {
            heap(format!("rows of {width} elements, a surface takes {}", limits.width))
        }
        Some(rows) if rows <= limits.height && rows > 0 && width > 0 => {
            Choice { memory: Memory::Surface, because: None }
        }
        Some(_) if shape.contains(&0) => heap("it has no elements".to_owned()),
        rows => {
            let rows = rows.map_or_else(|| "too many".to_owned(), |r| r.to_string());
            heap(format!("{rows} rows, a surface takes {}", limits.height))
        }
    }
}

/// How many layers of `kv_heads` × `rows` rows fit one surface; `None` when not even one does.
pub fn layers_a_surface(kv_heads: usize, rows: usize, limits: SurfaceLimits) -> Option<usize> {
    let layer = kv_heads.checked_mul(rows).filter(|&l| l > 0)?;
    Some(limits.height / layer).filter(|&layers| layers > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: SurfaceLimits = SurfaceLimits::GUARANTEED;

    #[test]
    fn an_output_within_the_limits_gets_a_surface() {
        let choice = choose_memory(Element::Float16, &[10, 3, 512, 64], LIMITS);
        assert_eq!(choice, Choice { memory: Memory::Surface, because: None });
        // Exactly at the limit.
        assert_eq!(choose_memory(Element::Float16, &[16_384, 16_384], LIMITS).memory, Memory::Surface);
    }

    #[test]
    fn what_does_not_fit_goes_to_the_heap_and_says_why() {
        for (element, shape, why) in [
            (Element::Float16, &[30, 3, 512, 64][..], "46080 rows, a surface takes 16384"),
            (Element::Float16, &[1, 49_152], "rows of 49152 elements, a surface takes 16384"),
            (Element::Float16, &[usize::MAX, 2, 4], "too many rows"),
            (Element::Float16, &[3, 0], "no elements"),
            (Element::Float16, &[0, 3], "no elements"),
            (Element::Float16, &[], "scalar"),
            (Element::Float32, &[2, 2], "float32"),
            (Element::Int8, &[2, 2], "int8"),
        ] {
            let choice = choose_memory(element, shape, LIMITS);
            assert_eq!(choice.memory, Memory::Heap, "{shape:?}");
            assert!(choice.because.as_ref().is_some_and(|b| b.contains(why)), "{choice:?}");
        }
    }

    #[test]
    fn larger_limits_change_the_choice() {
        let larger = SurfaceLimits { width: 65_536, height: 65_536 };
        assert_eq!(choose_memory(Element::Float16, &[30, 3, 512, 64], larger).memory, Memory::Surface);
        assert_eq!(SurfaceLimits::reported(0, 0), LIMITS);
    }

    #[test]
    fn layers_are_grouped_by_the_height() {
        assert_eq!(layers_a_surface(3, 512, LIMITS), Some(10));
        assert_eq!(layers_a_surface(8, 2048, LIMITS), Some(1));
        assert_eq!(layers_a_surface(8, 4096, LIMITS), None);
        assert_eq!(layers_a_surface(0, 512, LIMITS), None);
    }
}
