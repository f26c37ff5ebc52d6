package main

import (
	"encoding/xml"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestThereIsNoPictureWithoutANodeClaimInUse(t *testing.T) {
	p := &photographer{stop: make(chan struct{})}
	require.ErrorContains(t, p.save(t.TempDir()+"/none.svg"), "no NodeClaim was in use")
}

func TestAPictureHasTheTextAndTheColoursOfTheLines(t *testing.T) {
	picture := drawing([]string{"", "\x1b[1m54 s\x1b[0m  pods  \x1b[32m28\x1b[0m running", "\x1b[2m│\x1b[0mnodes <11> & more"})
	type text struct {
		Left       string `xml:"x,attr"`
		TextLength string `xml:"textLength,attr"`
		Weight     string `xml:"font-weight,attr"`
		Fill       string `xml:"fill,attr"`
		Text       string `xml:",chardata"`
	}
	var svg struct {
		Width  int    `xml:"width,attr"`
		Height int    `xml:"height,attr"`
		Texts  []text `xml:"text"`
	}
	require.NoError(t, xml.Unmarshal([]byte(picture), &svg))
	require.Equal(t, []text{
		{Left: "12", TextLength: "32", Weight: "bold", Text: "54\u00a0s"},
		{Left: "60", TextLength: "32", Text: "pods"},
		{Left: "108", TextLength: "16", Fill: "#3fb950", Text: "28"},
		{Left: "132", TextLength: "56", Text: "running"},
		{Left: "12", TextLength: "8", Fill: "#8b949e", Text: "│"},
		{Left: "20", TextLength: "136", Text: "nodes\u00a0<11>\u00a0&\u00a0more"},
	}, svg.Texts)
	require.Equal(t, 2*margin+22*columnWidth, svg.Width)
	require.Equal(t, 2*margin+3*lineHeight, svg.Height)
}
