package server

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"pgregory.net/rapid"
)

func TestEveryFrameIsCountedOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var sent bytes.Buffer
		sent.WriteString(http2.ClientPreface)
		framer := http2.NewFramer(&sent, nil)
		sizes := rapid.SliceOfN(rapid.OneOf(rapid.IntRange(0, 3), rapid.IntRange(0, 70_000)), 0, 20).Draw(t, "payloads")
		calls := 0
		for _, size := range sizes {
			kind := rapid.SampledFrom([]http2.FrameType{http2.FrameData, http2.FrameHeaders, http2.FrameContinuation}).Draw(t, "type")
			if kind == http2.FrameHeaders {
				calls++
			}
			require.NoError(t, framer.WriteRawFrame(kind, 0, 1, make([]byte, size)))
		}
		counted, begun, f := 0, 0, newFrames()
		for data := sent.Bytes(); len(data) > 0; {
			n := min(len(data), rapid.OneOf(rapid.IntRange(1, 12), rapid.IntRange(1, 100_000)).Draw(t, "read"))
			frames, headers := f.count(data[:n])
			counted, begun = counted+frames, begun+headers
			data = data[n:]
		}
		require.Len(t, sizes, counted)
		require.Equal(t, calls, begun)
	})
}
