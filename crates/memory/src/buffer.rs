//! Owned and foreign memory.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::Loan;

/// Every [`Buffer`] starts on this boundary: a page of Apple silicon, and a multiple of a page elsewhere.
pub const PAGE_BYTES: usize = 16_384;

/// From this size on a buffer is a mapping of its own: zero pages that exist once they are written, returned to the
/// system when the buffer goes.
const MAPPED_FROM_BYTES: usize = 64 << 10;

/// Memory that kvbaton owns: starts on a multiple of [`PAGE_BYTES`], never resized.
pub struct Buffer {
    start: NonNull<u8>,
    len_bytes: usize,
    source: Source,
}

/// What must be given back.
enum Source {
    Nothing,
    Heap(Layout),
    Mapping { _map: memmap2::MmapMut },
}

// SAFETY: a `Buffer` owns its memory alone; moving it to another thread moves the ownership.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` gives `&[u8]` only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len_bytes` zeroed bytes. Pages of large buffers are not touched.
    pub fn zeroed(len_bytes: usize) -> Buffer {
        if len_bytes == 0 {
            return Buffer { start: NonNull::dangling(), len_bytes: 0, source: Source::Nothing };
        }
        if let Some(buffer) = (len_bytes >= MAPPED_FROM_BYTES).then(|| Self::mapped(len_bytes)).flatten() {
            return buffer;
        }
        let layout = Layout::from_size_align(len_bytes, PAGE_BYTES)
            .expect("a buffer is smaller than the address space");
        // SAFETY: `layout` has a size above zero.
        let start =
            NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Buffer { start, len_bytes, source: Source::Heap(layout) }
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    fn mapped(len_bytes: usize) -> Option<Buffer> {
        let mut map = memmap2::MmapMut::map_anon(len_bytes.checked_add(PAGE_BYTES)?).ok()?;
        let lead = map.as_ptr().align_offset(PAGE_BYTES);
        let start = NonNull::from(map.get_mut(lead..lead.checked_add(len_bytes)?)?).cast();
        Some(Buffer { start, len_bytes, source: Source::Mapping { _map: map } })
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len_bytes` initialised bytes (zeroed at the start) as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Source::Heap(layout) = self.source {
            // SAFETY: `start` came from the allocator with this very layout and is freed once.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

/// Memory of somebody else, kept alive by its owner.
pub struct Foreign {
    start: NonNull<u8>,
    len_bytes: usize,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the owner is `Send + Sync` and the contract of `Foreign::new` forbids writes while it lives.
unsafe impl Send for Foreign {}
// SAFETY: as above: shared access is read-only.
unsafe impl Sync for Foreign {}

impl Foreign {
    /// Borrows `len_bytes` bytes at `start` until the value is dropped, and drops `owner` then.
    ///
    /// # Safety
    ///
    /// `start` must be readable for `len_bytes` bytes until `owner` is dropped, and nobody may write there
    /// while this value lives.
    pub unsafe fn new(start: NonNull<u8>, len_bytes: usize, owner: Box<dyn Any + Send + Sync>) -> Foreign {
        Foreign { start, len_bytes, _owner: owner }
    }
}

impl std::ops::Deref for Foreign {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the contract of `Foreign::new`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Foreign").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

/// Memory of somebody else that may be written, kept alive by its owner.
pub struct ForeignMut {
    start: NonNull<u8>,
    len_bytes: usize,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the owner is `Send + Sync` and the contract of `ForeignMut::new` keeps others away during an access.
unsafe impl Send for ForeignMut {}
// SAFETY: `&ForeignMut` gives `&[u8]` only.
unsafe impl Sync for ForeignMut {}

impl ForeignMut {
    /// Borrows `len_bytes` bytes at `start` for writing until the value is dropped, and drops `owner` then.
    ///
    /// # Safety
    ///
    /// `start` must be readable and writable for `len_bytes` initialised bytes until `owner` is dropped, and nobody else
    /// may read or write there while somebody does through this value.
    pub unsafe fn new(start: NonNull<u8>, len_bytes: usize, owner: Box<dyn Any + Send + Sync>) -> ForeignMut {
        ForeignMut { start, len_bytes, _owner: owner }
    }
}

impl std::ops::Deref for ForeignMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the contract of `ForeignMut::new`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl std::ops::DerefMut for ForeignMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the contract of `ForeignMut::new`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl fmt::Debug for ForeignMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignMut").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

/// Memory of any owner that may be written.
pub type WritableBytes = Box<dyn std::ops::DerefMut<Target = [u8]> + Send + Sync>;

/// A shared, read-only handle on bytes of any owner. Cloning copies the handle, never the bytes.
#[derive(Clone)]
pub struct Bytes(Arc<dyn AsBytes>);

trait AsBytes: Send + Sync {
    fn bytes(&self) -> &[u8];

    /// The loan that they are read under.
    fn loan(&self) -> Option<&Loan> {
        None
    }
}

impl<T: std::ops::Deref<Target = [u8]> + Send + Sync> AsBytes for T {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// Bytes whose buffer is given back after the last handle on them is gone.
struct OnLoan {
    // In this order: the bytes' owner goes before the loan.
    bytes: Bytes,
    loan: Loan,
}

impl AsBytes for OnLoan {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn loan(&self) -> Option<&Loan> {
        Some(&self.loan)
    }
}

impl Bytes {
    /// `bytes`, read under `loan`: it is over when the last handle is gone.
    pub fn on_loan(bytes: Bytes, loan: Loan) -> Bytes {
        Bytes(Arc::new(OnLoan { bytes, loan }))
    }

    /// Says that a GPU may be at work on them when the last handle is gone ([`Loan::leave_unsettled`]); of no
    /// consequence where they are on nobody's loan.
    pub fn leave_unsettled(&self) {
        if let Some(loan) = self.0.loan() {
            loan.leave_unsettled();
        }
    }

    /// Shares `owner`'s bytes.
    pub fn new(owner: impl std::ops::Deref<Target = [u8]> + Send + Sync + 'static) -> Bytes {
        Bytes(Arc::new(owner))
    }

    /// How many handles on these bytes there are, this one included.
    pub fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bytes").field("len_bytes", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Custody, Move, Phase};

    #[test]
    fn buffers_are_zeroed_aligned_and_hold_what_was_asked_for() {
        for len_bytes in [0, 1, 4096, MAPPED_FROM_BYTES - 1, MAPPED_FROM_BYTES, (3 << 20) + 5] {
            let mut buffer = Buffer::zeroed(len_bytes);
            assert_eq!(buffer.len(), len_bytes);
            assert!(buffer.iter().all(|b| *b == 0));
            assert!(len_bytes == 0 || (buffer.as_ptr() as usize).is_multiple_of(PAGE_BYTES));
            buffer.fill(0xA5);
            assert_eq!(&*Buffer::copy_of(&buffer), &*buffer);
        }
    }

    #[test]
    fn bytes_share_their_owner() {
        let bytes = Bytes::new(Buffer::copy_of(b"rows"));
        let again = bytes.clone();
        assert_eq!(bytes.as_ptr(), again.as_ptr());
        drop(bytes);
        assert_eq!(&*again, b"rows");
    }

    #[test]
    fn bytes_on_loan_give_their_buffer_back_and_may_leave_a_barrier_due() {
        for unsettled in [false, true] {
            let custody = Custody::fresh();
            custody.make(Move::Propose).unwrap();
            custody.make(Move::Written).unwrap();
            let bytes = Bytes::on_loan(Bytes::new(Buffer::copy_of(b"rows")), custody.lend().unwrap());
            let again = bytes.clone();
            if unsettled {
                again.leave_unsettled();
            }
            drop(bytes);
            assert_eq!(
                (&*again, custody.phase()),
                (&b"rows"[..], Phase::Lent { readers: 1, unsettled: false })
            );
            drop(again);
            assert_eq!(custody.phase(), if unsettled { Phase::Unsettled } else { Phase::Returned });
        }
        Bytes::new(Buffer::zeroed(1)).leave_unsettled();
    }

    #[test]
    fn a_foreign_owner_is_dropped_with_the_last_handle() {
        let owner = Arc::new(vec![1u8, 2, 3]);
        let start = NonNull::new(owner.as_ptr().cast_mut()).unwrap();
        // SAFETY: the vector lives as long as the owner and is not written.
        let foreign = unsafe { Foreign::new(start, 3, Box::new(owner.clone())) };
        let bytes = Bytes::new(foreign);
        assert_eq!((&*bytes, Arc::strong_count(&owner)), (&[1u8, 2, 3][..], 2));
        drop(bytes.clone());
        drop(bytes);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn foreign_memory_is_written_where_it_lies_and_its_owner_dropped_after() {
        let owner = Arc::new(());
        let mut memory = vec![1u8, 2, 3];
        let start = NonNull::from(&mut memory[..]).cast();
        // SAFETY: the vector outlives the value, and is not used meanwhile.
        let mut foreign = unsafe { ForeignMut::new(start, 3, Box::new(owner.clone())) };
        foreign[1] = 7;
        assert_eq!((&*foreign, Arc::strong_count(&owner)), (&[1u8, 7, 3][..], 2));
        drop(foreign);
        assert_eq!((memory, Arc::strong_count(&owner)), (vec![1, 7, 3], 1));
    }
}
