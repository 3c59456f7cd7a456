//! The hand-off of a run: which path the rows take.

use std::sync::{Arc, Mutex};

use kvbaton::{Error, HandoffReport, Prefill, PrefillReport, SharedPrefill};

use crate::host::{Adoption, Decoder};

/// Prefills all of `tokens` but the last, and hands the cache over.
///
/// Where the decoder takes memory over for nothing, it does, once all rows are there. Everywhere else rows are copied:
/// while the prefill runs with `stream`, else after it. The report says which it was, and how it is known that another
/// path was not open.
pub(super) fn hand_over(
    mut engine: Box<dyn Prefill>,
    decoder: &mut dyn Decoder,
    tokens: &[u32],
    adoption: Adoption,
    stream: bool,
) -> Result<(PrefillReport, HandoffReport), Error> {
    let prompt = &tokens[..tokens.len().saturating_sub(1)];
    let (prefill, mut handoff) = if adoption.free {
        let done = engine.prefill(prompt)?;
        (done.report, decoder.adopt(done.cache, tokens)?)
    } else if stream {
        let shared: SharedPrefill = Arc::new(Mutex::new(engine));
        decoder.receive_streamed(&shared, tokens)?
    } else {
        let done = engine.prefill(prompt)?;
        (done.report, decoder.receive(Some(done.cache), tokens)?)
    };
    handoff.because.get_or_insert(adoption.because);
    Ok((prefill, handoff))
}

#[cfg(test)]
mod tests {
    use kvbaton::fake::{FakePrefill, Habits};
    use kvbaton::layout::{CacheSpec, DType};
    use kvbaton::verify::Rung;
    use kvbaton::{CacheView, PathTaken};

    use super::*;
    use crate::host::{Generated, Token, VerifyRequest};

    /// A decoder that remembers what was asked of it.
    #[derive(Default)]
    struct Recorder {
        asked: Vec<&'static str>,
        /// What it says of an adoption; none of a plain receipt.
        adopts: Option<HandoffReport>,
    }

    impl Decoder for Recorder {
        fn engine(&self) -> String {
            "recorder".to_owned()
        }

        fn dtype(&self) -> Result<DType, Error> {
            unreachable!("nothing is compared")
        }

        fn adoption(&self) -> Result<Adoption, Error> {
            unreachable!("the caller has asked already")
        }

        fn adopt(&mut self, cache: CacheView, tokens: &[u32]) -> Result<HandoffReport, Error> {
            self.asked.push("adopt");
            assert_eq!(cache.tokens_seen() + 1, tokens.len());
            Ok(self.adopts.clone().expect("a decoder that adopts"))
        }

        fn encode(&self, _: &str, _: bool) -> Result<Vec<u32>, Error> {
            unreachable!("tokens are given")
        }

        fn receive(&mut self, _: Option<CacheView>, _: &[u32]) -> Result<HandoffReport, Error> {
            self.asked.push("receive");
            Ok(HandoffReport::of_nothing(0.0))
        }

        fn receive_streamed(
            &mut self,
            engine: &SharedPrefill,
            tokens: &[u32],
        ) -> Result<(PrefillReport, HandoffReport), Error> {
            self.asked.push("receive_streamed");
            let mut engine = engine.lock().expect("nobody panics");
            let done = engine.prefill(&tokens[..tokens.len() - 1])?;
            Ok((done.report, HandoffReport::of_nothing(0.0)))
        }

        fn prefill(&mut self, _: &[u32]) -> Result<PrefillReport, Error> {
            unreachable!("an engine prefills")
        }

        fn forget(&mut self, _: bool) -> Result<(), Error> {
            Ok(())
        }

        fn generate(
            &mut self,
            _: &[u32],
            _: usize,
            _: f64,
            _: &mut dyn FnMut(&Token) -> bool,
        ) -> Result<Generated, Error> {
            unreachable!("nothing is decoded")
        }

        fn verify(&mut self, _: VerifyRequest) -> Result<Vec<Rung>, Error> {
            unreachable!("nothing is compared")
        }
    }

    fn run(decoder: &mut Recorder, free: bool, stream: bool) -> (PrefillReport, HandoffReport) {
        let engine = FakePrefill::new(CacheSpec::full(2, 2, 4), &[8], Habits::default()).unwrap();
        let adoption = Adoption { free, because: "as measured".to_owned() };
        hand_over(Box::new(engine), decoder, &[1, 2, 3], adoption, stream).unwrap()
    }

    #[test]
    fn rows_are_copied_unless_taking_over_is_free() {
        for (stream, asked) in [(true, "receive_streamed"), (false, "receive")] {
            let mut decoder = Recorder::default();
            let (prefill, handoff) = run(&mut decoder, false, stream);
            assert_eq!((decoder.asked.as_slice(), prefill.tokens), (&[asked][..], 2));
            assert_eq!(handoff.because.as_deref(), Some("as measured"));
        }
    }

    #[test]
    fn memory_is_taken_over_where_that_is_free_and_the_decoder_says_what_became_of_it() {
        let taken = HandoffReport {
            path: PathTaken::Adopt,
            because: Some("every address is the producer's".to_owned()),
            ..HandoffReport::of_nothing(0.0)
        };
        for stream in [true, false] {
            let mut decoder = Recorder { adopts: Some(taken.clone()), ..Recorder::default() };
            let (_, handoff) = run(&mut decoder, true, stream);
            assert_eq!(decoder.asked, ["adopt"]);
            assert_eq!(handoff.path, PathTaken::Adopt);
            assert_eq!(handoff.because.as_deref(), Some("every address is the producer's"));
        }
        // Free as measured, and refused for this very cache: the decoder's reason is the one to report.
        let refused =
            HandoffReport { path: PathTaken::Fill, because: Some("no free row".to_owned()), ..taken };
        let mut decoder = Recorder { adopts: Some(refused), ..Recorder::default() };
        let (_, handoff) = run(&mut decoder, true, true);
        assert_eq!((handoff.path, handoff.because.as_deref()), (PathTaken::Fill, Some("no free row")));
    }
}
