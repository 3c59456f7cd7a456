//! The inverse of adoption: a runtime writes its output into memory that somebody else owns.

use kvbaton_memory::WritableBytes;
use kvbaton_runtime::{Call, Runtime, RuntimeError, Session};
use serde::Serialize;

use super::packages::Packages;
use super::runtime::{WRITTEN, doubled_into};
use crate::Error;

/// What became of an output whose backing was somebody else's memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WrittenInto {
    /// `coreml`, or `fake` where there is no Core ML.
    pub engine: &'static str,
    /// Whether the runtime returned the very array that it was offered.
    pub used: bool,
    /// Float16 elements that the output has, from the memory's start on.
    pub elements: usize,
    /// What each of them is, if they were written there.
    pub value: f32,
}

/// Proposes `memory` as the backing of an output and predicts once: by this Mac's Core ML, or by the fake of it elsewhere.
/// Whether the values arrived is for the memory's owner to see.
///
/// # Errors
///
/// When no array can be made on the memory, or the prediction fails.
pub fn write_into(memory: WritableBytes) -> Result<WrittenInto, Error> {
    let packages = Packages::unpack()?;
    write_with(this_system(), &packages, memory)
}

#[cfg(target_os = "macos")]
fn this_system() -> Session<impl Runtime> {
    crate::apple::session()
}

#[cfg(not(target_os = "macos"))]
fn this_system() -> Session<impl Runtime> {
    super::fake_session(kvbaton_runtime::fake::Habits::default())
}

fn write_with<R: Runtime>(
    mut session: Session<R>,
    packages: &Packages,
    memory: WritableBytes,
) -> Result<WrittenInto, Error> {
    let double = packages.double.clone();
    let used = session.with_runtime(Call::Predict, move |r: &mut R| -> Result<bool, RuntimeError> {
        doubled_into(r, &double, memory)
    })?;
    Ok(WrittenInto { engine: R::NAME, used, elements: WRITTEN, value: 2.0 })
}

#[cfg(test)]
mod tests {
    use std::ops::{Deref, DerefMut};
    use std::sync::mpsc;

    use kvbaton_memory::Buffer;
    use kvbaton_runtime::fake::Habits;

    use super::super::fake_session;
    use super::*;

    /// Memory that says what is in it when the runtime lets go.
    struct Parting(Buffer, mpsc::Sender<Vec<u8>>);

    impl Deref for Parting {
        type Target = [u8];

        fn deref(&self) -> &[u8] {
            &self.0
        }
    }

    impl DerefMut for Parting {
        fn deref_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }

    impl Drop for Parting {
        fn drop(&mut self) {
            let _ = self.1.send(self.0.to_vec());
        }
    }

    #[test]
    fn values_arrive_where_the_backing_is_used_and_nowhere_else() {
        let packages = Packages::unpack().unwrap();
        for (ignores_backings, used) in [(false, true), (true, false)] {
            let (left, leaving) = mpsc::channel();
            let foreign = Box::new(Parting(Buffer::zeroed(4096), left));
            let habits = Habits { ignores_backings, ..Habits::default() };
            let found = write_with(fake_session(habits), &packages, foreign).unwrap();
            assert_eq!((found.engine, found.used, found.elements), ("fake", used, 256));
            let memory = leaving.recv().unwrap();
            let two = half::f16::from_f32(2.0).to_le_bytes();
            assert_eq!(memory[..512].as_chunks::<2>().0.iter().all(|e| *e == two), used);
            assert!(memory[512..].iter().all(|b| *b == 0), "nothing behind the output is touched");
        }
    }
}
