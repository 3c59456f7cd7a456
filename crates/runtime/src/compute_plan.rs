//! What a compute plan means: how much of a prefill runs where.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{Operation, Units};

/// What runs on one device.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Share {
    /// Operations that it is preferred for.
    pub operations: usize,
    /// Their share of the estimated cost, 0 to 1; `None` where the plan estimates none.
    pub cost: Option<f64>,
}

/// A compute plan in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanSummary {
    /// By device: `ne`, `gpu`, `cpu`; `unknown` where the plan does not say.
    pub devices: BTreeMap<&'static str, Share>,
    /// Kinds of operations that are not on the Neural Engine, dearest first, with their number.
    pub off_neural_engine: Vec<(String, usize)>,
}

impl PlanSummary {
    /// Sums up a plan. Constants, which run nowhere, are not counted.
    pub fn of(operations: &[Operation]) -> PlanSummary {
        let counted = operations
            .iter()
            .filter(|o| plain(&o.kind) != "const" && !plain(&o.kind).starts_with("constexpr_"));
        let total: f64 = counted.clone().filter_map(|o| o.cost).sum();
        let mut devices: BTreeMap<&'static str, Share> = BTreeMap::new();
        let mut off: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
        for operation in counted {
            let device = operation.device.unwrap_or("unknown");
            let share = devices.entry(device).or_default();
            share.operations += 1;
            if let (Some(cost), true) = (operation.cost, total > 0.0) {
                *share.cost.get_or_insert(0.0) += cost / total;
            }
            if device != "ne" {
                let (count, cost) = off.entry(plain(&operation.kind)).or_default();
                *count += 1;
                *cost += operation.cost.unwrap_or(0.0);
            }
        }
        let mut off: Vec<_> = off.into_iter().collect();
        off.sort_by(|a, b| b.1.1.total_cmp(&a.1.1).then(b.1.0.cmp(&a.1.0)));
        PlanSummary {
            devices,
            off_neural_engine: off.into_iter().map(|(k, (n, _))| (k.to_owned(), n)).collect(),
        }
    }

    /// The share of the work that is on `device`, 0 to 1: of the estimated cost, or of the operations where the plan
    /// estimates none.
    pub fn share(&self, device: &str) -> f64 {
        let all: usize = self.devices.values().map(|s| s.operations).sum();
        let of = self.devices.get(device);
        let costed = self.devices.values().any(|s| s.cost.is_some());
        match of {
            None => 0.0,
            Some(share) if costed => share.cost.unwrap_or(0.0),
            Some(share) => share.operations as f64 / all.max(1) as f64,
        }
    }

    /// What to say when work that may run on the Neural Engine does not.
    pub fn warning(&self, units: Units) -> Option<String> {
        let share = self.share("ne");
        // A gather from the embedding and a large last product are off it in every model; more than that is news.
        if !units.neural_engine() || self.devices.is_empty() || share >= 0.9 {
            return None;
        }
        let kinds: Vec<String> =
            self.off_neural_engine.iter().take(4).map(|(kind, n)| format!("{kind} {n}")).collect();
        Some(format!(
            "compute units {units}: {:.0} % of the estimated work is on the Neural Engine; off it: {}",
            share * 100.0,
            kinds.join(", ")
        ))
    }
}

/// An operation's kind without its opset: frameworks say `ios18.matmul`.
fn plain(kind: &str) -> &str {
    kind.rsplit('.').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(kind: &str, device: Option<&'static str>, cost: Option<f64>) -> Operation {
        Operation { kind: kind.to_owned(), device, cost }
    }

    #[test]
    fn shares_are_of_the_cost_and_constants_do_not_count() {
        let plan = PlanSummary::of(&[
            operation("const", Some("cpu"), Some(1.0)),
            operation("constexpr_lut_to_dense", Some("cpu"), None),
            operation("ios18.constexpr_blockwise_shift_scale", Some("cpu"), Some(0.5)),
            operation("ios18.const", None, None),
            operation("ios18.linear", Some("ne"), Some(0.6)),
            operation("ios18.matmul", Some("gpu"), Some(0.3)),
            operation("ios18.gather", Some("cpu"), Some(0.1)),
        ]);
        assert_eq!(plan.devices["ne"].operations, 1);
        assert!((plan.share("ne") - 0.6).abs() < 1e-12);
        assert_eq!(plan.off_neural_engine, [("matmul".to_owned(), 1), ("gather".to_owned(), 1)]);
        assert_eq!(
            plan.warning(Units::CpuAndNe).as_deref(),
            Some(
                "compute units cpu-and-ne: 60 % of the estimated work is on the Neural Engine; \
                 off it: matmul 1, gather 1"
            )
        );
        assert_eq!(plan.warning(Units::CpuAndGpu), None);
    }

    #[test]
    fn without_costs_shares_are_of_the_operations() {
        let mut operations = vec![operation("linear", Some("ne"), None); 19];
        operations.push(operation("gather", None, None));
        let plan = PlanSummary::of(&operations);
        assert!((plan.share("ne") - 0.95).abs() < 1e-12);
        assert_eq!(plan.devices["unknown"], Share { operations: 1, cost: None });
        assert_eq!(plan.warning(Units::All), None);
    }

    #[test]
    fn an_empty_plan_says_nothing() {
        let plan = PlanSummary::of(&[]);
        assert_eq!((plan.share("ne"), plan.warning(Units::All)), (0.0, None));
    }
}
