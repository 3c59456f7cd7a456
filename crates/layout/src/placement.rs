//! Which slot holds which token.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::live::LayerLive;
use crate::{LayoutError, Window};

/// Which slot holds which token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// The oldest live row is in slot 0.
    #[default]
    Left,
    /// The newest row is in the last slot.
    Right,
    /// The row of position `p` is in slot `p % capacity`.
    Ring,
    /// The first `keep` slots stay, the others are a ring. Rows are in the order of time until the buffer is full;
    /// after that the producer says where the oldest is (`ring_start`), or it is the first that does not stay.
    RingIndexed,
    /// The oldest live row is in the slot that the producer names (`ring_start`), the others follow and go on in
    /// slot 0.
    RingFrom,
    /// Left, after as many padding slots as the producer says (`pad`).
    LeftPadded,
    /// Blocks of rows, in the order of a block table.
    Paged,
}

/// A run of rows in consecutive slots of one physical block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) rows: Range<i64>,
    pub(crate) block: usize,
    pub(crate) slot: usize,
}

/// The rows of one layer and the slots they may be in.
pub(crate) struct Placed<'a> {
    pub(crate) layer: usize,
    /// Slots, of one block where there are blocks.
    pub(crate) slots: usize,
    pub(crate) blocks: usize,
    pub(crate) live: LayerLive<'a>,
    pub(crate) window: Option<Window>,
}

impl Placed<'_> {
    /// Runs of live rows, the oldest first. Of a window only what it still attends to is live, wherever older rows
    /// may lie.
    pub(crate) fn runs(&self, placement: Placement) -> Result<Vec<Run>, LayoutError> {
        let n = self.live.seen;
        if let Some(live) = self.live.live.filter(|&live| live > n) {
            return Err(self.error(format!("{live} live rows of {n} tokens seen")));
        }
        let held = self.live.live.unwrap_or(n);
        let rows = |held: usize| signed(n - held)..signed(n);
        let runs = match placement {
            Placement::Left => {
                self.must_fit(held)?;
                vec![run(rows(held), 0)]
            }
            Placement::Right => {
                let held = self.rolling(held)?;
                vec![run(rows(held), self.slots - held)]
            }
            Placement::LeftPadded => {
                let pad = self.live.pad.ok_or_else(|| {
                    self.error("left-padded rows need the number of padding slots (`pad`)".to_owned())
                })?;
                self.must_fit(pad.saturating_add(held))?;
                vec![run(rows(held), pad)]
            }
            Placement::Ring => {
                let held = self.rolling(held)?;
                let start = (n - held) % self.slots.max(1);
                self.ring(rows(held), start, 0)
            }
            Placement::RingFrom => {
                let start = self.live.ring_start.ok_or_else(|| {
                    self.error("a ring needs the slot of its oldest row (`ring_start`)".to_owned())
                })?;
                let held = self.rolling(held)?;
                self.check_start(start, 0)?;
                self.ring(rows(held), start, 0)
            }
            Placement::RingIndexed => self.ring_indexed(self.rolling(held)?)?,
            Placement::Paged => self.paged(rows(held))?,
        };
        Ok(self.attended(runs))
    }

    /// Runs of the `steps` newest inputs of a convolution state. Those before the first token count too: they are
    /// the zeros that the state started with.
    pub(crate) fn conv_runs(
        &self,
        steps: usize,
        placement: Option<Placement>,
    ) -> Result<Vec<Run>, LayoutError> {
        self.must_fit(steps)?;
        let end = signed(self.live.seen);
        let rows = end - signed(steps)..end;
        let Some(placement) = placement else {
            if steps == self.slots {
                return Ok(vec![run(rows, 0)]);
            }
            return Err(self.error(format!(
                "its convolution state has {} slots for {steps} steps: the layout must state their `placement`",
                self.slots
            )));
        };
        match placement {
            Placement::Left => Ok(vec![run(rows, 0)]),
            Placement::Right => Ok(vec![run(rows, self.slots - steps)]),
            Placement::LeftPadded => {
                let pad = self.live.pad.ok_or_else(|| {
                    self.error(
                        "a padded convolution state needs the number of slots before it (`pad`)".to_owned(),
                    )
                })?;
                self.must_fit(pad.saturating_add(steps))?;
                Ok(vec![run(rows, pad)])
            }
            Placement::Ring => {
                let slots = signed(self.slots.max(1));
                let start = usize::try_from(rows.start.rem_euclid(slots)).unwrap_or(0);
                Ok(self.ring(rows, start, 0))
            }
            Placement::RingFrom => {
                let start = self.live.conv_start.ok_or_else(|| {
                    self.error("a circular convolution state needs its oldest slot (`conv_start`)".to_owned())
                })?;
                self.check_start(start, 0)?;
                Ok(self.ring(rows, start, 0))
            }
            Placement::RingIndexed | Placement::Paged => {
                Err(self.error("a convolution state is neither indexed nor paged".to_owned()))
            }
        }
    }

    fn ring_indexed(&self, held: usize) -> Result<Vec<Run>, LayoutError> {
        let n = self.live.seen;
        let keep = self.window.map_or(0, |w| w.keep).min(self.slots);
        let turned = self.live.ring_start.is_some() && held == self.slots;
        if held == n && !turned {
            return Ok(vec![run(0..signed(n), 0)]);
        }
        let kept = keep.min(held);
        let start = if held == self.slots { self.live.ring_start.unwrap_or(keep) } else { keep };
        if kept < held {
            self.check_start(start, keep)?;
        }
        let mut runs = self.ring(signed(n - (held - kept))..signed(n), start, keep);
        if kept > 0 {
            runs.insert(0, run(0..signed(kept), 0));
        }
        Ok(runs)
    }

    fn paged(&self, rows: Range<i64>) -> Result<Vec<Run>, LayoutError> {
        let held = length(&rows);
        let capacity = self.slots.saturating_mul(self.blocks);
        if held > capacity {
            return Err(LayoutError::Capacity { layer: self.layer, want: held, capacity });
        }
        let table = self
            .live
            .block_table
            .ok_or_else(|| self.error("paged rows need a block table (`block_table`)".to_owned()))?;
        let wanted = if held == 0 { 0 } else { held.div_ceil(self.slots) };
        let table = table.get(..wanted).ok_or_else(|| {
            self.error(format!(
                "the block table has {} entries, {held} rows in blocks of {} need {wanted}",
                table.len(),
                self.slots
            ))
        })?;
        let mut taken = vec![false; self.blocks];
        let mut runs = Vec::with_capacity(wanted);
        let mut first = rows.start;
        for &entry in table {
            let block = entry as usize;
            match taken.get_mut(block) {
                None => {
                    return Err(self.error(format!("block {block} of the table, of {} blocks", self.blocks)));
                }
                Some(true) => return Err(self.error(format!("block {block} is in the table twice"))),
                Some(taken) => *taken = true,
            }
            let end = (first + signed(self.slots)).min(rows.end);
            runs.push(Run { rows: first..end, block, slot: 0 });
            first = end;
        }
        Ok(runs)
    }

    /// Rows in the slots from `low` on, the oldest in slot `start`.
    fn ring(&self, rows: Range<i64>, start: usize, low: usize) -> Vec<Run> {
        let turn = (rows.start + signed(self.slots - start)).min(rows.end);
        vec![run(rows.start..turn, start), run(turn..rows.end, low)]
    }

    fn check_start(&self, start: usize, low: usize) -> Result<(), LayoutError> {
        if (low..self.slots).contains(&start) {
            return Ok(());
        }
        Err(self.error(format!("ring start {start} is not within {low}..{}", self.slots)))
    }

    fn must_fit(&self, want: usize) -> Result<(), LayoutError> {
        if want > self.slots {
            return Err(LayoutError::Capacity { layer: self.layer, want, capacity: self.slots });
        }
        Ok(())
    }

    /// Rows that a buffer holds from which the oldest drop out. Only a window may lose rows unsaid, and only those
    /// it no longer attends to: the next token reads one row less than the window has.
    fn rolling(&self, held: usize) -> Result<usize, LayoutError> {
        match self.window {
            Some(window) if self.live.live.is_none() => {
                self.must_fit(held.min(window.size.saturating_sub(1)))?;
                Ok(held.min(self.slots))
            }
            _ => self.must_fit(held).map(|()| held),
        }
    }

    /// What of `runs` the window attends to: the rows that stay and the newest of the others.
    fn attended(&self, runs: Vec<Run>) -> Vec<Run> {
        let n = self.live.seen;
        let Some(window) = self.window.filter(|w| n > w.size) else { return runs };
        let newest = signed(n - window.size.saturating_sub(window.keep));
        let kept = signed(window.keep).min(newest);
        let mut attended = Vec::with_capacity(runs.len() + 1);
        for run in runs {
            for part in [0..kept, newest..i64::MAX] {
                let rows = run.rows.start.max(part.start)..run.rows.end.min(part.end);
                if rows.start < rows.end {
                    let slot = run.slot + length(&(run.rows.start..rows.start));
                    attended.push(Run { rows, slot, ..run });
                }
            }
        }
        attended
    }

    fn error(&self, problem: String) -> LayoutError {
        LayoutError::LiveRows { layer: self.layer, problem }
    }
}

fn run(rows: Range<i64>, slot: usize) -> Run {
    Run { rows, block: 0, slot }
}

pub(crate) fn length(rows: &Range<i64>) -> usize {
    usize::try_from(rows.end - rows.start).unwrap_or(0)
}

pub(crate) fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
