package faults

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"io"
	"mime"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
)

// framing determines how the events of a watch are separated. Watches of built-in kinds use
// protobuf, all others JSON.
type framing struct {
	// next reads one event, including its separator. At the end it may return both a part and an
	// error.
	next func(*bufio.Reader) ([]byte, error)
	// gone is the event that ends a watch whose start has been compacted.
	gone []byte
	// ofObject reports whether an event is about an object, not a bookmark or an error.
	ofObject func(event []byte) bool
}

var (
	linesOfJSON = framing{
		next: func(r *bufio.Reader) ([]byte, error) { return r.ReadBytes('\n') },
		gone: append(must(json.Marshal(expiry(must(json.Marshal(tooOld))))), '\n'),
		ofObject: func(event []byte) bool {
			var e struct {
				Type string `json:"type"`
			}
			return json.Unmarshal(event, &e) == nil && tellsOfObject(e.Type)
		},
	}
	framesOfProtobuf = framing{
		next: nextFrame,
		gone: framed(must(new(expiry(must(runtime.Encode(protobufEncoder(), tooOld)))).Marshal())),
		ofObject: func(event []byte) bool {
			var e metav1.WatchEvent
			return len(event) > sizeOfLength && e.Unmarshal(event[sizeOfLength:]) == nil && tellsOfObject(e.Type)
		},
	}
)

func tellsOfObject(kind string) bool {
	switch watch.EventType(kind) {
	case watch.Added, watch.Modified, watch.Deleted:
		return true
	case watch.Bookmark, watch.Error:
	}
	return false
}

// framingOf returns the framing of a watch's response.
func framingOf(header http.Header) framing {
	if mediaType, _, err := mime.ParseMediaType(header.Get("Content-Type")); err == nil && mediaType == runtime.ContentTypeProtobuf {
		return framesOfProtobuf
	}
	return linesOfJSON
}

var tooOld = &metav1.Status{
	TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
	Status:   metav1.StatusFailure, Code: http.StatusGone, Reason: metav1.StatusReasonExpired,
	Message: "too old resource version: injected by the test",
}

func expiry(status []byte) metav1.WatchEvent {
	return metav1.WatchEvent{Type: string(watch.Error), Object: runtime.RawExtension{Raw: status}}
}

func protobufEncoder() runtime.Encoder {
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		panic("client-go knows no protobuf")
	}
	return scheme.Codecs.EncoderForVersion(info.Serializer, metav1.Unversioned)
}

// sizeOfLength is the size of the length that precedes each frame.
const sizeOfLength = 4

func nextFrame(r *bufio.Reader) ([]byte, error) {
	length, err := r.Peek(sizeOfLength)
	if err != nil {
		return nil, err
	}
	frame := make([]byte, sizeOfLength+int(binary.BigEndian.Uint32(length)))
	n, err := io.ReadFull(r, frame)
	return frame[:n], err
}

func framed(event []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(event))), event...)
}

// must panics on errors of constant expressions, which fail in every run or in none.
func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
