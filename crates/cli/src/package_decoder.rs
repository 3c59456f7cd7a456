//! Decoding with a package: an engine that steps, and a tokenizer that only Python has.

use std::time::Instant;

use kvbaton::layout::DType;
use kvbaton::verify::Rung;
use kvbaton::{
    CacheView, Decode, Error, ErrorKind, HandoffReport, Logits, Memcpy, PrefillReport, SharedPrefill,
    Threads, memcpy_share,
};

use crate::host::{Adoption, Decoder, Generated, Token, Tokenizer, VerifyRequest};

/// A decode package and, where there is one, a tokenizer.
pub(crate) struct PackageDecoder<'a> {
    engine: Box<dyn Decode>,
    tokenizer: Option<Box<dyn Tokenizer + 'a>>,
    threads: Threads,
    random: fastrand::Rng,
}

impl<'a> PackageDecoder<'a> {
    pub(crate) fn new(
        engine: Box<dyn Decode>,
        tokenizer: Option<Box<dyn Tokenizer + 'a>>,
        threads: usize,
    ) -> PackageDecoder<'a> {
        PackageDecoder { engine, tokenizer, threads: Threads::new(threads), random: fastrand::Rng::new() }
    }

    fn text(&mut self, token: u32, ends: bool) -> Result<String, Error> {
        match &mut self.tokenizer {
            Some(tokenizer) if !ends => tokenizer.add(token),
            _ => Ok(String::new()),
        }
    }
}

impl Decoder for PackageDecoder<'_> {
    fn engine(&self) -> String {
        self.engine.engine().to_owned()
    }

    fn dtype(&self) -> Result<DType, Error> {
        Err(Error::new(ErrorKind::Unavailable, "a decode package's caches cannot be compared yet"))
    }

    fn compute_units(&self) -> Option<String> {
        self.engine.compute_units().map(|units| units.name().to_owned())
    }

    fn notes(&self) -> Vec<String> {
        self.engine.notes().to_vec()
    }

    fn adoption(&self) -> Result<Adoption, Error> {
        Ok(Adoption {
            free: false,
            because: "copied: the states of a package are its engine's own".to_owned(),
        })
    }

    fn encode(&self, prompt: &str, ignore_chat_template: bool) -> Result<Vec<u32>, Error> {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.encode(prompt, ignore_chat_template),
            None => Err(Error::new(ErrorKind::Usage, "neither side has a tokenizer")
                .hint("name a folder that has one with --tokenizer, or give ids with --prompt-tokens")),
        }
    }

    fn receive(&mut self, cache: Option<CacheView>, _: &[u32]) -> Result<HandoffReport, Error> {
        let start = Instant::now();
        let Some(view) = cache else {
            self.engine.clear()?;
            return Ok(HandoffReport::of_nothing(start.elapsed().as_secs_f64()));
        };
        let mut report = self.engine.receive(&view, &self.threads)?;
        report.seconds = start.elapsed().as_secs_f64();
        report.exposed_seconds = report.seconds;
        compare_with_memcpy(&mut report, &self.threads);
        Ok(report)
    }

    /// States are filled when all rows are there: no prediction may run on a state that is being written.
    fn receive_streamed(
        &mut self,
        engine: &SharedPrefill,
        tokens: &[u32],
    ) -> Result<(PrefillReport, HandoffReport), Error> {
        let prompt = &tokens[..tokens.len().saturating_sub(1)];
        let prefilled = engine.lock().unwrap_or_else(|e| e.into_inner()).prefill(prompt)?;
        Ok((prefilled.report, self.receive(Some(prefilled.cache), tokens)?))
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<PrefillReport, Error> {
        let prompt = &tokens[..tokens.len().saturating_sub(1)];
        self.engine.clear()?;
        let start = Instant::now();
        for &token in prompt {
            self.engine.step(token)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(PrefillReport::new(&self.engine(), "decode".to_owned(), prompt.len(), seconds))
    }

    fn forget(&mut self, _: bool) -> Result<(), Error> {
        self.engine.clear()
    }

    fn verify(&mut self, _: VerifyRequest) -> Result<Vec<Rung>, Error> {
        Err(Error::new(ErrorKind::Unavailable, "a decode package's caches cannot be compared yet"))
    }

    fn generate(
        &mut self,
        remaining: &[u32],
        max_tokens: usize,
        temperature: f64,
        emit: &mut dyn FnMut(&Token) -> bool,
    ) -> Result<Generated, Error> {
        let ends = match &self.tokenizer {
            Some(tokenizer) => tokenizer.ends()?,
            None => Vec::new(),
        };
        let mut done = Generated {
            tokens: Vec::new(),
            text: String::new(),
            first_step_seconds: 0.0,
            seconds: 0.0,
            first_step_copied_bytes: None,
        };
        let before = self.engine.addresses();
        let start = Instant::now();
        let (earlier, last) = remaining.split_at(remaining.len().saturating_sub(1));
        for &token in earlier {
            self.engine.step(token)?;
        }
        let mut token = last.first().copied().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a decoder starts from a token, and none remains")
        })?;
        while done.tokens.len() < max_tokens {
            // A full context ends the answer as its length does, unless it leaves none.
            if !done.tokens.is_empty() && self.engine.tokens_seen() >= self.engine.capacity() {
                break;
            }
            let logits = self.engine.step(token)?;
            token = choose(&logits, temperature, &mut self.random)?;
            if done.tokens.is_empty() {
                done.first_step_seconds = start.elapsed().as_secs_f64();
                let after = self.engine.addresses();
                done.first_step_copied_bytes = before.as_ref().zip(after).map(|(before, after)| {
                    let moved = before.iter().zip(&after).filter(|((old, _), (new, _))| old != new);
                    moved.map(|((_, bytes), _)| bytes).sum()
                });
            }
            done.tokens.push(token);
            let ended = ends.contains(&token);
            let text = self.text(token, ended)?;
            done.text.push_str(&text);
            if !emit(&Token { id: token, text }) {
                return Err(Error::new(ErrorKind::Interrupted, "interrupted"));
            }
            if ended {
                break;
            }
        }
        done.seconds = start.elapsed().as_secs_f64();
        if let Some(tokenizer) = &mut self.tokenizer {
            let text = tokenizer.finish()?;
            if !text.is_empty() {
                emit(&Token { id: token, text: text.clone() });
                done.text.push_str(&text);
            }
        }
        Ok(done)
    }
}

/// The likeliest token, or one drawn from the distribution at `temperature`.
fn choose(logits: &Logits, temperature: f64, random: &mut fastrand::Rng) -> Result<u32, Error> {
    let best = logits.values.iter().copied().enumerate().filter(|(_, v)| !v.is_nan());
    let best = best.reduce(|best, other| if other.1 > best.1 { other } else { best });
    let Some((best, top)) = best else {
        return Err(Error::new(ErrorKind::Program, "the program's logits are no numbers"));
    };
    let token = if temperature > 0.0 {
        let weight = |v: f32| (f64::from(v - top) / temperature).exp();
        let total: f64 = logits.values.iter().map(|v| weight(*v)).filter(|w| w.is_finite()).sum();
        let mut left = random.f64() * total;
        let drawn = logits.values.iter().position(|v| {
            let w = weight(*v);
            left -= if w.is_finite() { w } else { 0.0 };
            left < 0.0
        });
        drawn.unwrap_or(best)
    } else {
        best
    };
    u32::try_from(token).map_err(|_| Error::new(ErrorKind::Program, "more logits than token ids"))
}

/// Right after the fill, into memory in the same state as the states were, outside every reported time.
fn compare_with_memcpy(report: &mut HandoffReport, threads: &Threads) {
    if report.bytes == 0 {
        return;
    }
    let start = Instant::now();
    let mut memcpy = Memcpy::new(report.bytes);
    memcpy.seconds(threads);
    // States are zeros that nobody has written: their pages come with the first write.
    let cold = report.touched_share.is_some_and(|share| share < 0.5);
    let mut once = || if cold { memcpy.cold_seconds(threads) } else { memcpy.seconds(threads) };
    let mut seconds = [once(), once(), once()];
    seconds.sort_by(f64::total_cmp);
    report.memcpy_ratio = memcpy_share(report.bytes, seconds[1], report.copy_seconds);
    if report.memcpy_ratio.is_some_and(|ratio| ratio > 1.05) {
        report.note = Some(
            "faster than the memcpy beside it, which moved as many bytes on the same threads into memory that was as \
             touched, and streamed no stores; its source was another buffer"
                .to_owned(),
        );
    }
    report.yardstick_seconds = start.elapsed().as_secs_f64();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(values: &[f32]) -> Logits {
        Logits { values: values.to_vec() }
    }

    #[test]
    fn the_likeliest_token_is_the_first_of_equals_and_never_a_nan() {
        let mut random = fastrand::Rng::with_seed(1);
        assert_eq!(choose(&logits(&[1.0, 3.0, 3.0, f32::NAN]), 0.0, &mut random).unwrap(), 1);
        assert!(choose(&logits(&[f32::NAN]), 0.0, &mut random).is_err());
    }

    #[test]
    fn a_temperature_draws_in_proportion() {
        let mut random = fastrand::Rng::with_seed(7);
        let values = logits(&[0.0, 2f32.ln(), f32::NEG_INFINITY, 5f32.ln()]);
        let mut counts = [0usize; 4];
        for _ in 0..8000 {
            counts[choose(&values, 1.0, &mut random).unwrap() as usize] += 1;
        }
        assert_eq!(counts[2], 0);
        for (count, share) in counts.into_iter().zip([1.0, 2.0, 0.0, 5.0]) {
            let expected = share / 8.0 * 8000.0;
            // Five standard deviations of a binomial count.
            assert!((count as f64 - expected).abs() <= 5.0 * (8000.0f64 * 0.25).sqrt(), "{counts:?}");
        }
    }
}
