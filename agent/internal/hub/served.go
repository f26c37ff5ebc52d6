package hub

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Served is a transport that tells an object that does not exist from one whose resource the API server does not serve, as while its CRD is
// deleted and made again, or serves another version: the server answers both with 404, which clients take for the first. The second becomes
// 503, a failed read.
func Served(next http.RoundTripper) http.RoundTripper { return served{next} }

type served struct{ next http.RoundTripper }

// RoundTrip sends the request.
func (s served) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := s.next.RoundTrip(request)
	// Of an object that does not exist, the API server answers a Status.
	_, namespaced := resourceOf(request.URL.Path)
	if err != nil || response.StatusCode != http.StatusNotFound || !namespaced ||
		!strings.HasPrefix(response.Header.Get("Content-Type"), "text/plain") {
		return response, err
	}
	_ = response.Body.Close() // nothing of it is needed
	status, err := json.Marshal(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: http.StatusServiceUnavailable, Reason: metav1.StatusReasonServiceUnavailable,
		Message: fmt.Sprintf("the API server does not serve %s: is its CRD installed, in this version?", request.URL.Path),
	})
	if err != nil {
		return nil, fmt.Errorf("encoding a status: %w", err)
	}
	changed := *response
	changed.StatusCode, changed.Status = http.StatusServiceUnavailable, "503 "+http.StatusText(http.StatusServiceUnavailable)
	changed.Header = http.Header{"Content-Type": []string{"application/json"}}
	changed.Body, changed.ContentLength = io.NopCloser(bytes.NewReader(status)), int64(len(status))
	return &changed, nil
}
