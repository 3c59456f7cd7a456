//! Compute units: where a model may run, and where else when it cannot run there.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// Where a model may run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Units {
    /// Wherever the system prefers.
    #[default]
    All,
    /// The Neural Engine, and the CPU for what it does not take.
    CpuAndNe,
    /// The GPU, and the CPU for what it does not take.
    CpuAndGpu,
    /// The CPU alone.
    Cpu,
}

impl Units {
    /// All of them.
    pub const EACH: [Units; 4] = [Units::All, Units::CpuAndNe, Units::CpuAndGpu, Units::Cpu];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Units::All => "all",
            Units::CpuAndNe => "cpu-and-ne",
            Units::CpuAndGpu => "cpu-and-gpu",
            Units::Cpu => "cpu",
        }
    }

    /// Whether the Neural Engine may be used.
    pub fn neural_engine(self) -> bool {
        matches!(self, Units::All | Units::CpuAndNe)
    }

    /// What is tried in turn. Units that somebody asked for are never replaced; those that nobody chose are, by
    /// units without the engine that was waited for.
    pub fn attempts(asked: Option<Units>) -> Vec<Units> {
        match asked {
            Some(units) => vec![units],
            None => vec![Units::All, Units::CpuAndGpu, Units::Cpu],
        }
    }
}

impl fmt::Display for Units {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Units {
    type Err = String;

    fn from_str(name: &str) -> Result<Units, String> {
        Units::EACH.into_iter().find(|u| u.name() == name).ok_or_else(|| {
            let known = Units::EACH.map(Units::name).join(", ");
            format!("no compute units are called `{name}`; known: {known}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for units in Units::EACH {
            assert_eq!(units.name().parse(), Ok(units));
        }
        assert!("ane".parse::<Units>().unwrap_err().contains("cpu-and-ne"));
    }

    #[test]
    fn units_that_were_asked_for_are_not_replaced() {
        assert_eq!(Units::attempts(Some(Units::CpuAndNe)), [Units::CpuAndNe]);
        let own = Units::attempts(None);
        assert!(own.len() > 1 && own[1..].iter().all(|u| !u.neural_engine()));
    }
}
