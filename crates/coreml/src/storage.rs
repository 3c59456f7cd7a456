//! Memory for outputs: surfaces, page-aligned heap blocks, and the locks through which they are read.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use block2::RcBlock;
use kvbaton_memory::{Buffer, Bytes, Foreign, WritableBytes};
use kvbaton_runtime::{ArrayInfo, Call, Element, RuntimeError, SurfaceLimits};
use objc2::AnyThread;
use objc2::rc::Retained;
use objc2_core_foundation::{CFDictionary, CFRetained, CFString, CFType};
use objc2_core_ml::MLMultiArray;
use objc2_core_video::{
    CVPixelBuffer, CVPixelBufferCreate, CVPixelBufferGetBaseAddress, CVPixelBufferGetBytesPerRow,
    CVPixelBufferGetHeight, CVPixelBufferLockBaseAddress, CVPixelBufferLockFlags,
    CVPixelBufferUnlockBaseAddress, kCVPixelBufferIOSurfacePropertiesKey,
    kCVPixelFormatType_OneComponent16Half, kCVReturnSuccess,
};
use objc2_io_surface::{IOSurfaceRef, kIOSurfaceHeight, kIOSurfaceWidth};

use crate::arrays::{self, Array, data_type, list};
use crate::failed;

/// The largest surface, as the system says.
pub(crate) fn surface_limits() -> SurfaceLimits {
    // SAFETY: constants of the framework, set before the program starts.
    let (width, height) = unsafe { (kIOSurfaceWidth, kIOSurfaceHeight) };
    SurfaceLimits::reported(IOSurfaceRef::property_maximum(width), IOSurfaceRef::property_maximum(height))
}

/// A float16 array in a surface: its last dimension is the image's width, the others its height.
pub(crate) fn surface(shape: &[usize]) -> Result<Array, RuntimeError> {
    let (&width, outer) = shape
        .split_last()
        .ok_or_else(|| RuntimeError::failed(Call::Backing, "a scalar cannot lie in a surface"))?;
    let height = outer.iter().product();
    let empty: CFRetained<CFDictionary<CFString, CFType>> = CFDictionary::empty();
    let mut image: *mut CVPixelBuffer = ptr::null_mut();
    // SAFETY: the dictionary holds what the key asks for; `image` is written before the call returns.
    let status = unsafe {
        let attributes = CFDictionary::<CFString, CFType>::from_slices(
            &[kCVPixelBufferIOSurfacePropertiesKey],
            &[empty.as_ref()],
        );
        CVPixelBufferCreate(
            None,
            width,
            height,
            kCVPixelFormatType_OneComponent16Half,
            Some(attributes.as_opaque()),
            NonNull::from(&mut image),
        )
    };
    let image = NonNull::new(image).filter(|_| status == kCVReturnSuccess).ok_or_else(|| {
        RuntimeError::failed(Call::Backing, format!("a surface of {width} × {height}: status {status}"))
    })?;
    // SAFETY: a successful call hands over one reference.
    let image = unsafe { CFRetained::from_raw(image) };
    // SAFETY: the image's format is float16, and its size is the shape's.
    let multi =
        unsafe { MLMultiArray::initWithPixelBuffer_shape(MLMultiArray::alloc(), &image, &list(shape)) };
    Ok(Array::own(multi))
}

/// Memory that a multi-array writes and kvbaton reads, in turns.
pub(crate) struct HeapBlock {
    start: NonNull<u8>,
    _memory: WritableBytes,
}

// SAFETY: the memory is `Send` and stays where it is; the block itself gives no access.
unsafe impl Send for HeapBlock {}
// SAFETY: as above; custody lets Core ML write, or readers read, never both.
unsafe impl Sync for HeapBlock {}

/// A packed array in page-aligned memory, released once Core ML and every reader have let go.
pub(crate) fn heap(element: Element, shape: &[usize]) -> Result<Array, RuntimeError> {
    let info = ArrayInfo::packed(element, shape);
    on_memory(&info, Box::new(Buffer::zeroed(info.len_bytes)))
}

/// A packed array on memory of somebody else.
pub(crate) fn foreign(
    element: Element,
    shape: &[usize],
    memory: WritableBytes,
) -> Result<Array, RuntimeError> {
    let info = ArrayInfo::packed(element, shape);
    if info.len_bytes > memory.len() {
        let message = format!("{} bytes are needed, there are {}", info.len_bytes, memory.len());
        return Err(RuntimeError::failed(Call::Backing, message));
    }
    on_memory(&info, memory)
}

fn on_memory(info: &ArrayInfo, mut memory: WritableBytes) -> Result<Array, RuntimeError> {
    let start = NonNull::from(&mut **memory).cast::<u8>();
    let block = Arc::new(HeapBlock { start, _memory: memory });
    let (element, shape) = (info.element, &info.shape);
    let strides: Vec<usize> = info.strides_bytes.iter().map(|s| s / element.size_bytes()).collect();
    let kept = block.clone();
    let release = RcBlock::new(move |_: NonNull<c_void>| {
        // The block itself holds the memory: it goes with Core ML's last reference on the block.
        let _ = &kept;
    });
    // SAFETY: `start` is valid for the array's bytes as long as the deallocator block is kept.
    let multi = unsafe {
        MLMultiArray::initWithDataPointer_shape_dataType_strides_deallocator_error(
            MLMultiArray::alloc(),
            start.cast::<c_void>(),
            &list(shape),
            data_type(element),
            &list(&strides),
            Some(&release),
        )
    }
    .map_err(failed(Call::Backing))?;
    Ok(Array { multi, heap: Some(block) })
}

/// For reading and for writing: whoever takes the memory over writes there.
const ACCESS: CVPixelBufferLockFlags = CVPixelBufferLockFlags::empty();

/// An image that is locked; unlocked when dropped.
struct Lock {
    image: CFRetained<CVPixelBuffer>,
    /// Core ML may give the image of an array of its own to the next prediction once the array is gone.
    _array: Retained<MLMultiArray>,
}

// SAFETY: reference counts, and Core Video's locks, may be used from any thread; the array is only released.
unsafe impl Send for Lock {}
// SAFETY: as above; a shared lock offers nothing.
unsafe impl Sync for Lock {}

impl Drop for Lock {
    fn drop(&mut self) {
        // SAFETY: balances the lock that made this value, with the same flags.
        unsafe { CVPixelBufferUnlockBaseAddress(&self.image, ACCESS) };
    }
}

/// An array's bytes, readable until the last handle on them is gone.
pub(crate) fn lock(array: &Array, info: &ArrayInfo) -> Result<Bytes, RuntimeError> {
    if let Some(pixels) = array.pixels() {
        return lock_image(array, pixels.into(), info);
    }
    if let Some(block) = &array.heap {
        let block = block.clone();
        // SAFETY: the block has the array's bytes and lives as long as its owner here; custody forbids writing
        // meanwhile.
        let foreign = unsafe { Foreign::new(block.start, info.len_bytes, Box::new(block)) };
        return Ok(Bytes::new(foreign));
    }
    // Core ML's own memory is readable inside a handler alone: it is copied.
    let mut copy = None;
    arrays::read(&array.multi, Call::Lock, &mut |_, bytes| {
        copy = bytes.get(..info.len_bytes).map(Buffer::copy_of);
    })?;
    copy.map(Bytes::new).ok_or_else(|| RuntimeError::failed(Call::Lock, "fewer bytes than described"))
}

fn lock_image(
    array: &Array,
    image: CFRetained<CVPixelBuffer>,
    info: &ArrayInfo,
) -> Result<Bytes, RuntimeError> {
    let wrong = |message: String| RuntimeError::failed(Call::Lock, message);
    // SAFETY: the image is valid; the lock is balanced by `Lock`.
    let status = unsafe { CVPixelBufferLockBaseAddress(&image, ACCESS) };
    if status != kCVReturnSuccess {
        return Err(wrong(format!("status {status}")));
    }
    let lock = Lock { image, _array: array.multi.clone() };
    let have = CVPixelBufferGetBytesPerRow(&lock.image) * CVPixelBufferGetHeight(&lock.image);
    if info.len_bytes > have {
        return Err(wrong(format!("the array reaches byte {}, its image has {have}", info.len_bytes)));
    }
    let start = NonNull::new(CVPixelBufferGetBaseAddress(&lock.image).cast::<u8>())
        .ok_or_else(|| wrong("the locked image has no address".to_owned()))?;
    // SAFETY: a locked image is readable for all its rows until it is unlocked; custody forbids writing meanwhile.
    Ok(Bytes::new(unsafe { Foreign::new(start, info.len_bytes, Box::new(lock)) }))
}
