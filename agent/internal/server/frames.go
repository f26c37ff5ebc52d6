package server

import "golang.org/x/net/http2"

// frameHeader is the length of what is before the payload of an HTTP/2 frame.
const frameHeader = 9

// frames counts the frames in what an HTTP/2 client sends. The transport keeps a hundred bytes for each frame of a request beside its payload, which
// may be one byte or none.
type frames struct {
	// rest is how much of the client's preface, or of a payload, is still to come.
	rest   int
	header [frameHeader]byte
	// have is how much of the next header has come.
	have int
}

func newFrames() *frames { return &frames{rest: len(http2.ClientPreface)} }

// count takes the next bytes, and returns how many frames begin in them: those whose header ends there.
func (f *frames) count(data []byte) int {
	begun := 0
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
		}
	}
	return begun
}
