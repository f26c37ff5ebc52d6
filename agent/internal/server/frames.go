package server

import "golang.org/x/net/http2"

// frameHeader is the length of an HTTP/2 frame header in bytes.
const frameHeader = 9

// frames counts the HTTP/2 frames that a client sends. For each frame of a request the transport
// keeps a hundred bytes in addition to the payload, which may be one byte or empty.
type frames struct {
	// rest is how many bytes of the client preface or of the current payload are still expected.
	rest   int
	header [frameHeader]byte
	// have is how many bytes of the next header have arrived.
	have int
}

func newFrames() *frames { return &frames{rest: len(http2.ClientPreface)} }

// count consumes data, and returns how many frame headers were completed by it, and how many of
// them are of frames that begin a call.
func (f *frames) count(data []byte) (begun, calls int) {
	for len(data) > 0 {
		if f.rest > 0 {
			skipped := min(f.rest, len(data))
			f.rest -= skipped
			data = data[skipped:]
			continue
		}
		copied := copy(f.header[f.have:], data)
		f.have += copied
		data = data[copied:]
		if f.have == frameHeader {
			f.rest = int(f.header[0])<<16 | int(f.header[1])<<8 | int(f.header[2])
			f.have = 0
			begun++
			if http2.FrameType(f.header[3]) == http2.FrameHeaders {
				calls++
			}
		}
	}
	return begun, calls
}
