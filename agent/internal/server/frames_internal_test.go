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
		for _, size := range sizes {
			require.NoError(t, framer.WriteRawFrame(http2.FrameData, 0, 1, make([]byte, size)))
		}
		counted, f := 0, newFrames()
		for data := sent.Bytes(); len(data) > 0; {
			n := min(len(data), rapid.OneOf(rapid.IntRange(1, 12), rapid.IntRange(1, 100_000)).Draw(t, "read"))
			counted += f.count(data[:n])
			data = data[n:]
		}
		require.Len(t, sizes, counted)
	})
}
