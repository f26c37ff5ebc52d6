package abuse

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
)

const (
	// streamWindow is how much of a stream may be sent before the receiver extends the window:
	// HTTP/2's default.
	streamWindow = 1<<16 - 1
	// maxFrame is HTTP/2's default for the largest frame.
	maxFrame = 1 << 14
	// prefix is the length of the header of each message in a gRPC stream.
	prefix = 5
)

var errClosed = errors.New("the agent has closed the connection")

// peer is an HTTP/2 connection whose flow control an attack can abuse, within the protocol. It
// answers pings and settings. ended is called when a call ends.
type peer struct {
	ended func(stream uint32, answer string)

	mu      sync.Mutex
	opened  sync.Cond     // of mu: the window has grown, or the connection has ended
	out     *bufio.Writer // flushed after each call and answer
	framer  *http2.Framer
	headers bytes.Buffer
	encoder *hpack.Encoder
	next    uint32
	window  int // of the connection, for sending
	part    int // the maximum size of data frames
	closed  bool
}

// newPeer starts the protocol on a connection. The caller must call [peer.read].
func newPeer(conn net.Conn, ended func(stream uint32, answer string), settings ...http2.Setting) (*peer, error) {
	p := &peer{ended: ended, out: bufio.NewWriterSize(conn, 2*maxFrame), next: 1, window: streamWindow, part: maxFrame}
	p.framer = http2.NewFramer(p.out, conn)
	p.opened.L = &p.mu
	p.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.encoder = hpack.NewEncoder(&p.headers)
	if _, err := p.out.WriteString(http2.ClientPreface); err != nil {
		return nil, err
	}
	return p, errors.Join(p.framer.WriteSettings(settings...), p.out.Flush())
}

// read returns the reason once the connection has ended.
func (p *peer) read() error {
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.closed = true
		p.opened.Broadcast()
	}()
	for {
		frame, err := p.framer.ReadFrame()
		if stream := (http2.StreamError{}); errors.As(err, &stream) {
			p.ended(stream.StreamID, "reset")
			continue
		}
		if err != nil {
			return err
		}
		if err := p.take(frame); err != nil {
			return err
		}
	}
}

func (p *peer) take(frame http2.Frame) error {
	switch frame := frame.(type) {
	case *http2.MetaHeadersFrame:
		if frame.StreamEnded() {
			p.ended(frame.StreamID, statusOf(frame))
		}
		return nil
	case *http2.RSTStreamFrame:
		if frame.ErrCode != http2.ErrCodeNo { // no error means that no more of an answered request is wanted
			p.ended(frame.StreamID, "reset")
		}
		return nil
	case *http2.GoAwayFrame:
		return errClosed
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch frame := frame.(type) {
	case *http2.SettingsFrame:
		if !frame.IsAck() {
			return errors.Join(p.framer.WriteSettingsAck(), p.out.Flush())
		}
	case *http2.PingFrame:
		if !frame.IsAck() {
			return errors.Join(p.framer.WritePing(true, frame.Data), p.out.Flush())
		}
	case *http2.WindowUpdateFrame:
		if frame.StreamID == 0 {
			p.window += int(frame.Increment)
			p.opened.Broadcast()
		}
	}
	return nil
}

// statusOf returns the name of the code with which a call ended.
func statusOf(trailers *http2.MetaHeadersFrame) string {
	for _, field := range trailers.Fields {
		if code, err := strconv.ParseUint(field.Value, 10, 32); field.Name == "grpc-status" && err == nil {
			return codes.Code(code).String()
		}
	}
	return codes.Unknown.String()
}

// begin begins a call and sends nothing of its message.
func (p *peer) begin(method string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := p.headersOf(method, nil); err != nil {
		return err
	}
	return p.out.Flush()
}

// headersOf writes the headers of a call. It requires p.mu.
func (p *peer) headersOf(method string, more []hpack.HeaderField) (stream uint32, err error) {
	stream = p.next
	p.next += 2
	p.headers.Reset()
	for _, field := range append([]hpack.HeaderField{
		{Name: ":method", Value: "POST"},
		{Name: ":scheme", Value: "https"},
		{Name: ":path", Value: method},
		{Name: ":authority", Value: "agent"},
		{Name: "content-type", Value: "application/grpc"},
		{Name: "te", Value: "trailers"},
	}, more...) {
		if err := p.encoder.WriteField(field); err != nil {
			return 0, err
		}
	}
	return stream, p.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: p.headers.Bytes(), EndHeaders: true})
}

// call begins a call with more header fields, announces a message of the given length, and sends
// the given part of it.
func (p *peer) call(method string, length int, message []byte, more ...hpack.HeaderField) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	stream, err := p.headersOf(method, more)
	if err != nil {
		return err
	}
	whole := len(message) == length
	for data := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(length)), message...); len(data) > 0; {
		part := data[:min(len(data), p.part)]
		data = data[len(part):]
		for p.window < len(part) && !p.closed {
			if err := p.out.Flush(); err != nil {
				return err
			}
			p.opened.Wait()
		}
		if p.closed {
			return errClosed
		}
		p.window -= len(part)
		if err := p.framer.WriteData(stream, whole && len(data) == 0, part); err != nil {
			return err
		}
	}
	return p.out.Flush()
}

// readSlowly lets the receiver of the calls send this many bytes per second, until the connection
// has ended.
func (p *peer) readSlowly(ended <-chan struct{}, bytesPerSecond int) {
	const partsPerSecond = 4
	ticker := time.NewTicker(time.Second / partsPerSecond)
	defer ticker.Stop()
	for {
		select {
		case <-ended:
			return
		case <-ticker.C:
		}
		if p.widen(bytesPerSecond/partsPerSecond) != nil {
			return
		}
	}
}

// widen extends the connection's window for answers.
func (p *peer) widen(bytes int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return errors.Join(p.framer.WriteWindowUpdate(0, uint32(bytes)), p.out.Flush())
}
