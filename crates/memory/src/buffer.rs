//! Owned and foreign memory.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Every [`Buffer`] starts on this boundary: a page of Apple silicon, and a multiple of a page elsewhere.
pub const PAGE_BYTES: usize = 16_384;

/// Memory that kvbaton owns: page aligned, never resized.
pub struct Buffer {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: a `Buffer` owns its memory alone; moving it to another thread moves the ownership.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` gives `&[u8]` only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len_bytes` zeroed bytes. Large buffers come from fresh pages that the system zeroes on first touch.
    pub fn zeroed(len_bytes: usize) -> Buffer {
        let Some(layout) = Self::layout(len_bytes) else {
            return Buffer { start: NonNull::dangling(), len_bytes: 0 };
        };
        // SAFETY: `layout` has a size above zero.
        let start =
            NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Buffer { start, len_bytes }
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Buffer {
        let Some(layout) = Self::layout(bytes.len()) else {
            return Buffer { start: NonNull::dangling(), len_bytes: 0 };
        };
        // SAFETY: `layout` has a size above zero.
        let start = NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the new allocation holds `bytes.len()` bytes and cannot overlap `bytes`.
        unsafe { start.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Buffer { start, len_bytes: bytes.len() }
    }

    fn layout(len_bytes: usize) -> Option<Layout> {
        (len_bytes > 0).then(|| {
            Layout::from_size_align(len_bytes, PAGE_BYTES)
                .expect("a buffer is smaller than the address space")
        })
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len_bytes` initialised bytes as long as `self` lives.
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
        if let Some(layout) = Self::layout(self.len_bytes) {
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

/// A shared, read-only handle on bytes of any owner. Cloning copies the handle, never the bytes.
#[derive(Clone)]
pub struct Bytes(Arc<dyn AsBytes>);

trait AsBytes: Send + Sync {
    fn bytes(&self) -> &[u8];
}

impl<T: std::ops::Deref<Target = [u8]> + Send + Sync> AsBytes for T {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl Bytes {
    /// Shares `owner`'s bytes.
    pub fn new(owner: impl std::ops::Deref<Target = [u8]> + Send + Sync + 'static) -> Bytes {
        Bytes(Arc::new(owner))
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
