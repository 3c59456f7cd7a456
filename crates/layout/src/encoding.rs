//! How elements are encoded, and what the tensors of an encoding hold.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::DType;

/// How elements are encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Encoding {
    /// The element type itself.
    #[default]
    Plain,
    /// Signed bytes times a scale for each token and head.
    Int8PerTokenHead,
    /// Signed bytes times a scale for each token, shared by its heads.
    Int8PerToken,
    /// MLX's affine codes: `scale · code + bias` for each group of lanes, packed into 32-bit words from the low
    /// bit upwards.
    #[serde(untagged)]
    Affine {
        /// Bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Lanes that share a scale and a bias: 32, 64 or 128.
        group_size: usize,
    },
}

impl Encoding {
    /// Type of the stored elements, where the encoding fixes it.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Encoding::Plain => None,
            Encoding::Int8PerTokenHead | Encoding::Int8PerToken => Some(DType::Int8),
            Encoding::Affine { .. } => Some(DType::UInt32),
        }
    }

    /// What the tensors of the encoding are.
    pub fn roles(self) -> &'static [Role] {
        match self {
            Encoding::Plain => &[Role::Elements],
            Encoding::Int8PerTokenHead | Encoding::Int8PerToken => &[Role::Elements, Role::Scale],
            Encoding::Affine { .. } => &[Role::Elements, Role::Scale, Role::Bias],
        }
    }

    /// Elements that a tensor of `role` stores for one head and row of `lanes` lanes, which fill whole groups.
    pub fn stored_elements(self, role: Role, lanes: usize) -> usize {
        match (self, role) {
            (Encoding::Affine { bits, .. }, Role::Elements) => lanes / 32 * usize::from(bits),
            (Encoding::Affine { group_size, .. }, _) => lanes / group_size.max(1),
            (_, Role::Elements) => lanes,
            _ => 1,
        }
    }

    /// [`Encoding::stored_elements`], or what is wrong where the lanes do not fill whole groups.
    pub(crate) fn stored(self, role: Role, lanes: usize) -> Result<usize, String> {
        match self {
            Encoding::Affine { group_size, .. } if !lanes.is_multiple_of(group_size) => {
                let fits = [128, 64, 32].into_iter().find(|g| lanes.is_multiple_of(*g));
                let advice = fits.map_or_else(String::new, |g| format!("; groups of {g} would"));
                Err(format!("groups of {group_size} do not divide {lanes} lanes{advice}"))
            }
            _ => Ok(self.stored_elements(role, lanes)),
        }
    }

    /// Lanes of a head and row of `stored` elements.
    pub fn lanes(self, stored: usize) -> usize {
        match self {
            Encoding::Affine { bits, .. } => stored * 32 / usize::from(bits.max(1)),
            _ => stored,
        }
    }

    /// What is wrong with it.
    pub(crate) fn problem(self) -> Option<String> {
        let Encoding::Affine { bits, group_size } = self else { return None };
        if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
            return Some(format!("affine codes have 2, 3, 4, 5, 6 or 8 bits, not {bits}"));
        }
        (!matches!(group_size, 32 | 64 | 128))
            .then(|| format!("affine groups have 32, 64 or 128 lanes, not {group_size}"))
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Encoding::Plain => f.write_str("plain"),
            Encoding::Int8PerTokenHead => f.write_str("int8 per token and head"),
            Encoding::Int8PerToken => f.write_str("int8 per token"),
            Encoding::Affine { bits, group_size } => write!(f, "{bits}-bit affine in groups of {group_size}"),
        }
    }
}

/// What a tensor is within its encoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The elements, or their codes.
    #[default]
    Elements,
    /// The scales of the codes.
    Scale,
    /// The biases of the codes.
    Bias,
}

impl Role {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Role::Elements => "elements",
            Role::Scale => "scales",
            Role::Bias => "biases",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// MLX's shapes: codes `lanes · bits / 32` words, scales and biases `lanes / group`.
    #[test]
    fn affine_sizes_are_mlx_s() {
        for (bits, group_size) in [2, 3, 4, 5, 6, 8].into_iter().flat_map(|b| [(b, 32), (b, 64), (b, 128)]) {
            let encoding = Encoding::Affine { bits, group_size };
            assert_eq!(encoding.problem(), None);
            assert_eq!(encoding.stored(Role::Elements, 256), Ok(256 * usize::from(bits) / 32));
            assert_eq!(encoding.stored(Role::Scale, 256), Ok(256 / group_size));
            assert_eq!(encoding.stored(Role::Bias, 256), Ok(256 / group_size));
            assert_eq!(encoding.lanes(256 * usize::from(bits) / 32), 256);
        }
    }

    #[test]
    fn heads_that_do_not_fill_groups_name_the_group_that_fits() {
        let encoding = Encoding::Affine { bits: 8, group_size: 64 };
        let problem = encoding.stored(Role::Elements, 96).unwrap_err();
        assert_eq!(problem, "groups of 64 do not divide 96 lanes; groups of 32 would");
        let problem = encoding.stored(Role::Elements, 80).unwrap_err();
        assert_eq!(problem, "groups of 64 do not divide 80 lanes");
    }

    #[test]
    fn codes_and_groups_that_mlx_lacks_are_refused() {
        for (bits, group_size, says) in
            [(7, 64, "not 7"), (16, 64, "not 16"), (4, 48, "not 48"), (4, 0, "not 0")]
        {
            let problem = Encoding::Affine { bits, group_size }.problem().expect("it is wrong");
            assert!(problem.contains(says), "{problem}");
        }
    }
}
