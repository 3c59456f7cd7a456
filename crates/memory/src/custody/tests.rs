use proptest::prelude::*;

use super::*;

const PHASES: [Phase; 9] = [
    Phase::Fresh,
    Phase::Backing,
    Phase::Readable,
    Phase::Lent { readers: 1, unsettled: false },
    Phase::Lent { readers: 2, unsettled: true },
    Phase::Unsettled,
    Phase::Returned,
    Phase::Input,
    Phase::Lost,
];

const MOVES: [Move; 9] = [
    Move::Propose,
    Move::Written,
    Move::Ignored,
    Move::Lend,
    Move::GiveBack { settled: true },
    Move::GiveBack { settled: false },
    Move::Settle,
    Move::Input,
    Move::Lose,
];

#[test]
fn only_a_buffer_that_nobody_reads_and_no_prediction_has_read_is_proposed() {
    for phase in PHASES {
        let allowed = matches!(phase, Phase::Fresh | Phase::Returned);
        assert_eq!(phase.after(Move::Propose).is_ok(), allowed, "{phase:?}");
    }
}

#[test]
fn an_input_is_an_input_for_ever() {
    for wanted in MOVES {
        assert!(matches!(Phase::Input.after(wanted), Ok(Phase::Input) | Err(_)), "{wanted:?}");
    }
}

#[test]
fn a_lost_buffer_is_never_used_again() {
    for wanted in MOVES {
        assert!(matches!(Phase::Lost.after(wanted), Ok(Phase::Lost) | Err(_)), "{wanted:?}");
    }
}

#[test]
fn a_refusal_says_where_the_buffer_is_what_was_wanted_and_why_not() {
    let custody = Custody::fresh();
    custody.make(Move::Propose).unwrap();
    custody.make(Move::Written).unwrap();
    let loan = custody.lend().unwrap();
    let refused = custody.make(Move::Propose).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "a buffer that is still read by 1 cannot be proposed to a prediction: \
         drop the views of the last prediction first"
    );
    assert_eq!(
        custody.phase(),
        Phase::Lent { readers: 1, unsettled: false },
        "a refused move changes nothing"
    );
    drop(loan);
    assert_eq!(custody.phase(), Phase::Returned);
}

#[test]
fn what_a_gpu_read_waits_for_a_barrier() {
    let custody = Custody::fresh();
    custody.make(Move::Propose).unwrap();
    custody.make(Move::Written).unwrap();
    let (host, gpu) = (custody.lend().unwrap(), custody.lend().unwrap());
    gpu.leave_unsettled();
    drop(gpu);
    drop(host);
    assert_eq!(custody.phase(), Phase::Unsettled);
    assert!(custody.make(Move::Propose).unwrap_err().to_string().contains("barrier"));
    custody.make(Move::Settle).unwrap();
    assert_eq!(custody.make(Move::Propose).unwrap(), Phase::Backing);
}

proptest! {
    /// Any schedule, legal or not: the machine agrees with a naive account of what has happened.
    #[test]
    fn random_schedules_keep_the_books(moves in prop::collection::vec(prop::sample::select(&MOVES[..]), 0..200)) {
        let mut phase = Phase::Fresh;
        let (mut readers, mut written, mut was_input, mut in_flight, mut gpu) = (0usize, false, false, false, false);
        let mut lost = false;
        for wanted in moves {
            let free = !(in_flight || written || readers > 0 || gpu || lost);
            let expected = match wanted {
                Move::Propose => free && !was_input,
                Move::Input => free,
                Move::Written | Move::Ignored | Move::Lose => in_flight,
                Move::Lend => written || readers > 0,
                Move::GiveBack { .. } => written || readers > 0,
                Move::Settle => true,
            };
            match phase.after(wanted) {
                Err(refused) => {
                    prop_assert!(!expected, "{phase:?} {wanted:?}");
                    prop_assert_eq!(refused, IllegalMove { phase, wanted });
                }
                Ok(next) => {
                    prop_assert!(expected, "{phase:?} {wanted:?}");
                    match wanted {
                        Move::Propose => in_flight = true,
                        Move::Written => (in_flight, written) = (false, true),
                        Move::Ignored => in_flight = false,
                        Move::Lose => (in_flight, lost) = (false, true),
                        Move::Lend => (written, readers) = (false, readers + 1),
                        Move::GiveBack { settled } if readers > 0 => {
                            readers -= 1;
                            gpu |= !settled;
                        }
                        Move::GiveBack { .. } => written = false,
                        Move::Settle => gpu = false,
                        Move::Input => was_input = true,
                    }
                    phase = next;
                }
            }
        }
    }
}
