use super::*;
use crate::LiveRows;

/// The position in every slot, by [`Placed::runs`].
fn slots(
    placement: Placement,
    slots: usize,
    live: &LiveRows,
    window: Option<Window>,
) -> Result<Vec<Option<i64>>, LayoutError> {
    slots_of(placement, slots, 1, live, window)
}

fn slots_of(
    placement: Placement,
    slots: usize,
    blocks: usize,
    live: &LiveRows,
    window: Option<Window>,
) -> Result<Vec<Option<i64>>, LayoutError> {
    let placed = Placed { layer: 0, slots, blocks, live: live.of_layer(0), window };
    let mut found = vec![None; slots * blocks];
    for run in placed.runs(placement)? {
        for (i, row) in run.rows.clone().enumerate() {
            let at = &mut found[run.block * slots + run.slot + i];
            assert_eq!(*at, None, "two rows in one slot");
            *at = Some(row);
        }
    }
    Ok(found)
}

fn window(size: usize, keep: usize) -> Option<Window> {
    Some(Window { size, keep })
}

fn some(rows: &[i64]) -> Vec<Option<i64>> {
    rows.iter().map(|&r| (r >= 0).then_some(r)).collect()
}

#[test]
fn left_rows_start_in_slot_0() {
    assert_eq!(slots(Placement::Left, 4, &LiveRows::seen(3), None), Ok(some(&[0, 1, 2, -1])));
    let chunk = LiveRows { live: Some(2), ..LiveRows::seen(9) };
    assert_eq!(slots(Placement::Left, 3, &chunk, None), Ok(some(&[7, 8, -1])));
}

#[test]
fn right_rows_end_in_the_last_slot() {
    assert_eq!(slots(Placement::Right, 4, &LiveRows::seen(3), None), Ok(some(&[-1, 0, 1, 2])));
    assert_eq!(slots(Placement::Right, 4, &LiveRows::seen(9), window(4, 0)), Ok(some(&[5, 6, 7, 8])));
}

#[test]
fn padded_rows_follow_the_padding() {
    let live = LiveRows { pad: Some(2), ..LiveRows::seen(3) };
    assert_eq!(slots(Placement::LeftPadded, 6, &live, None), Ok(some(&[-1, -1, 0, 1, 2, -1])));
}

/// A ring is what writing every token to `position % capacity` leaves.
#[test]
fn rings_hold_what_writing_token_by_token_leaves() {
    for capacity in 1..6 {
        for n in 0..20 {
            let mut want = vec![None; capacity];
            for p in 0..n {
                want[p % capacity] = Some(p as i64);
            }
            let got = slots(Placement::Ring, capacity, &LiveRows::seen(n), window(capacity, 0)).unwrap();
            assert_eq!(got, want, "capacity {capacity}, {n} tokens");
        }
    }
}

/// mlx-lm's `RotatingKVCache`, token by token: grow to the window, then overwrite from `keep` on.
#[test]
fn indexed_rings_hold_what_rotating_caches_hold() {
    for (size, keep) in [(4, 0), (5, 2), (3, 1), (6, 5)] {
        for n in 0..25_usize {
            let (mut buffer, mut index) = (vec![None; size], 0);
            for p in 0..n {
                if index == size {
                    index = keep;
                }
                buffer[index] = Some(p as i64);
                index += 1;
            }
            let start = if index == size { keep } else { index };
            let ring_start = (n >= size).then_some(start);
            let live = LiveRows { ring_start, ..LiveRows::seen(n) };
            let got = slots(Placement::RingIndexed, size, &live, window(size, keep)).unwrap();
            assert_eq!(got, buffer, "window {size}, keep {keep}, {n} tokens");
        }
    }
}

#[test]
fn a_named_start_wraps_at_the_capacity() {
    let live = LiveRows { ring_start: Some(3), live: Some(4), ..LiveRows::seen(10) };
    assert_eq!(slots(Placement::RingFrom, 5, &live, None), Ok(some(&[8, 9, -1, 6, 7])));
}

#[test]
fn pages_follow_the_block_table() {
    let live = LiveRows { block_table: Some(vec![2, 0]), ..LiveRows::seen(3) };
    assert_eq!(slots_of(Placement::Paged, 2, 3, &live, None), Ok(some(&[2, -1, -1, -1, 0, 1])));
}

/// Saved after a multi-token prefill, a rotating buffer is longer than its window (mlx-examples #1093).
#[test]
fn d11_of_13_rows_in_a_window_of_8_the_last_8_are_live() {
    let got = slots(Placement::RingIndexed, 13, &LiveRows::seen(13), window(8, 0)).unwrap();
    let want: Vec<_> = (0..13).map(|p| (p >= 5).then_some(p)).collect();
    assert_eq!(got, want);
}

/// mlx-vlm PR #1748: the rows of a ring in the order of time.
#[test]
fn d09_a_ring_unrolls_to_the_order_of_time() {
    let live = LiveRows { ring_start: Some(4), ..LiveRows::seen(20) };
    let got = slots(Placement::RingIndexed, 8, &live, window(8, 0)).unwrap();
    assert_eq!(got, some(&[16, 17, 18, 19, 12, 13, 14, 15]));
}

/// mlx-lm #983, #1000, #1116: neither the offset nor an index is the number of rows.
#[test]
fn d10_live_rows_are_the_lesser_of_offset_and_window() {
    let w = 8;
    for offset in [w - 1, w, w + 1, 3 * w + 2] {
        for placement in [Placement::Ring, Placement::RingIndexed, Placement::Right] {
            let got = slots(placement, w, &LiveRows::seen(offset), window(w, 0)).unwrap();
            let rows: Vec<_> = got.iter().flatten().copied().collect();
            assert_eq!(rows.len(), offset.min(w), "{placement:?} at {offset}");
            assert_eq!(rows.iter().max(), Some(&(offset as i64 - 1)));
        }
    }
}

#[test]
fn rows_outside_the_window_are_not_live_in_a_buffer_of_the_whole_context() {
    let got = slots(Placement::Left, 8, &LiveRows::seen(7), window(4, 1)).unwrap();
    assert_eq!(got, some(&[0, -1, -1, -1, 4, 5, 6, -1]));
}

#[test]
fn each_layer_may_say_its_own() {
    let mut live = LiveRows { ring_start: Some(0), ..LiveRows::seen(9) };
    live.layers.insert(1, crate::LayerRows { ring_start: Some(2), ..Default::default() });
    assert_eq!(live.of_layer(0).ring_start, Some(0));
    assert_eq!(live.of_layer(1).ring_start, Some(2));
}

#[test]
fn what_a_placement_needs_and_lacks_is_named() {
    let seen = LiveRows::seen;
    let table = |t: &[u32]| LiveRows { block_table: Some(t.to_vec()), ..seen(5) };
    for (placement, live, win, says) in [
        (Placement::Left, LiveRows { live: Some(6), ..seen(5) }, None, "6 live rows of 5 tokens seen"),
        (Placement::Left, seen(5), None, "5 live rows do not fit the capacity of 4"),
        (Placement::Right, seen(5), None, "5 live rows do not fit"),
        (Placement::Ring, seen(5), None, "5 live rows do not fit"),
        (Placement::RingIndexed, seen(5), None, "5 live rows do not fit"),
        (Placement::Ring, seen(9), window(8, 0), "7 live rows do not fit"),
        (Placement::LeftPadded, seen(2), None, "(`pad`)"),
        (Placement::LeftPadded, LiveRows { pad: Some(3), ..seen(2) }, None, "5 live rows do not fit"),
        (Placement::RingFrom, seen(2), None, "(`ring_start`)"),
        (Placement::RingFrom, LiveRows { ring_start: Some(4), ..seen(2) }, None, "4 is not within 0..4"),
        (
            Placement::RingIndexed,
            LiveRows { ring_start: Some(0), ..seen(9) },
            window(4, 1),
            "ring start 0 is not within 1..4",
        ),
        (Placement::Paged, seen(5), None, "(`block_table`)"),
        (Placement::Paged, table(&[0]), None, "has 1 entries"),
        (Placement::Paged, table(&[0, 7]), None, "block 7 of the table"),
        (Placement::Paged, table(&[1, 1]), None, "block 1 is in the table twice"),
        (Placement::Paged, seen(13), None, "13 live rows do not fit the capacity of 12"),
    ] {
        let blocks = if placement == Placement::Paged { 3 } else { 1 };
        let error = slots_of(placement, 4, blocks, &live, win).unwrap_err().to_string();
        assert!(error.contains(says), "{placement:?}: {error}");
    }
}

fn conv(
    placement: Option<Placement>,
    steps: usize,
    slots: usize,
    live: &LiveRows,
) -> Result<Vec<i64>, LayoutError> {
    let placed = Placed { layer: 0, slots, blocks: 1, live: live.of_layer(0), window: None };
    let mut found = vec![i64::MIN; slots];
    for run in placed.conv_runs(steps, placement)? {
        for (i, row) in run.rows.clone().enumerate() {
            found[run.slot + i] = row;
        }
    }
    Ok(found)
}

#[test]
fn convolution_steps_are_the_newest_inputs() {
    let live = LiveRows { pad: Some(1), conv_start: Some(2), ..LiveRows::seen(10) };
    assert_eq!(conv(None, 3, 3, &live), Ok(vec![7, 8, 9]));
    let none = i64::MIN;
    assert_eq!(conv(Some(Placement::Left), 3, 4, &live), Ok(vec![7, 8, 9, none]));
    assert_eq!(conv(Some(Placement::Right), 3, 4, &live), Ok(vec![none, 7, 8, 9]));
    assert_eq!(conv(Some(Placement::LeftPadded), 3, 5, &live), Ok(vec![none, 7, 8, 9, none]));
    assert_eq!(conv(Some(Placement::Ring), 3, 3, &live), Ok(vec![9, 7, 8]));
    assert_eq!(conv(Some(Placement::RingFrom), 3, 3, &live), Ok(vec![8, 9, 7]));
    // Before the first token its steps are the zeros it started with.
    assert_eq!(conv(Some(Placement::Ring), 3, 3, &LiveRows::seen(1)), Ok(vec![0, -2, -1]));
}

#[test]
fn convolution_states_that_leave_their_steps_open_are_refused() {
    for (placement, slots, says) in [
        (None, 4, "4 slots for 3 steps"),
        (None, 2, "3 live rows do not fit the capacity of 2"),
        (Some(Placement::LeftPadded), 5, "(`pad`)"),
        (Some(Placement::RingFrom), 3, "(`conv_start`)"),
        (Some(Placement::Paged), 3, "neither indexed nor paged"),
    ] {
        let error = conv(placement, 3, slots, &LiveRows::seen(10)).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
